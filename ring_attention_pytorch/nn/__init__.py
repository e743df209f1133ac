"""Layers and models, and the sharding of whole sequences."""
