"""Training on spread sequences: batches, labels, losses, data."""
