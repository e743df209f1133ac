"""Generated faults that no test can find, each with the reason."""

SURVIVORS = {
    "geometry/layouts.py:positions:call dropped:0": "all_segments refuses the same, and alike",
    "ranks/agreement.py:_check_same:condition dropped:0": "one member is like itself: a shortcut",
    "ranks/agreement.py:agree:always:4": "claims that are the same are compared, and are the same",
    "ranks/agreement.py:note:always:0": "None is written as null, as it is then",
    "runtime/accumulate.py:OutputAccumulator.finalize:always:2": "a result is copied once more",
    "runtime/accumulate.py:_Accumulator._room:comparison:5":
        "a running sum that is a part is the only one, and is taken for the sum",
}  # fmt: skip
