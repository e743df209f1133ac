"""The transports of keys and gradients, shared memory, and exchanges of pieces."""
