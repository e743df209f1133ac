"""Inference: a cache of keys and values that is spread over ranks, and attention to it."""
