"""Layers and models that run over a ring, and functions that shard whole sequences."""
