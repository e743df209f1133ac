"""What lies between a training loop and attention: batches, labels, losses, data."""
