"""Which keys come when, and what that costs: arithmetic on ints."""
