"""Programs that show the library at work: `python -m examples.demo` is the place to start."""
