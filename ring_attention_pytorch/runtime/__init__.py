"""Parts of one attention step on a device: interfaces, accumulators, streams, graphs."""
