"""Faults planted into what checks arguments, and into checks of sizes: a list for each battery."""

from tests.faults.mutant import Mutant

SILENT = [
    Mutant(
        "a module is not among its method's arguments, so nobody is told",
        "arguments.py:Arguments.by_name",
        "{**kwargs, **dict(zip(self.signature.parameters, args))}", "dict(kwargs)",
    ),
    Mutant(
        "a bool is a number", "arguments.py:_checked",
        "conf=_CONF", "conf=BeartypeConf(is_color=False)",
    ),
    Mutant(
        "an option that a function gives itself is Python's error",
        "arguments.py:Arguments.refusal",
        "if decided and decided[1] in kwargs", "if False and decided[1] in kwargs",
    ),
    Mutant(
        "no steps are none said", "routing/router.py:CoordinateDescentRouter.__init__",
        "1 if n_iters is None else n_iters", "n_iters or 1",
    ),
]  # fmt: skip
