"""The order of transfers and computation, and the time it takes: arithmetic on ints."""
