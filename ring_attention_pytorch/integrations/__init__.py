"""Adapters to other packages. Each module imports its own package, which nothing else needs."""
