"""Everything that talks to other processes: rings, agreement, and the transports of keys."""
