"""Adapters to other packages. Each module needs its own, and nothing else here needs the module."""
