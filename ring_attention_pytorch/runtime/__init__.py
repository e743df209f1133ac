"""One attention step on a device: interfaces, accumulators, streams, launches, graphs."""
