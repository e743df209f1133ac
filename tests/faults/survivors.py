"""Generated faults that no test can find, each with the reason."""

SURVIVORS = {
    "comm/collectives.py:_gather:function dropped:0":
        "each message makes a copy of its own then",
    "comm/collectives.py:fill_in:always:0": "a rank alone sends nothing: a shortcut",
    "comm/collectives.py:fill_in:comparison:0": "the same",
    "geometry/layouts.py:positions:call dropped:0": "all_segments refuses the same, and alike",
    "ranks/agreement.py:_check_same:condition dropped:0": "one member is like itself: a shortcut",
    "ranks/agreement.py:agree:condition dropped:5":
        "a ring of one in a larger group: only tests with processes have one",
    "recurrent/levels.py:in_full_precision:never:0":
        "autocast is turned off where it is off: a shortcut",
    "runtime/accumulate.py:OutputAccumulator.finalize:always:2": "a result is copied once more",
    "runtime/accumulate.py:_Accumulator._update_memory:comparison:7":
        "a running sum that is a part is the only one, and is taken for the sum",
}  # fmt: skip
