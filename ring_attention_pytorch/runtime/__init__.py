"""What one step of attention is made of on a device: interfaces, accumulators, streams, graphs."""
