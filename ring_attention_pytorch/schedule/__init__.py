"""The order in which keys come, and what that costs: arithmetic on ints."""
