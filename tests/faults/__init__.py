"""Planted faults that the suite must find: batteries of cases, and how faults are planted.

The faults lie beside the tests of what they break: `tests/*/faults.py`.
"""

BATTERIES = (
    "attention", "doctor", "failing", "kept", "original", "routing", "schedules", "second_order",
    "silent", "training",
)  # fmt: skip
