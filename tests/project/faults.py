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
        "a generator is checked when somebody runs it", "arguments.py:_checked",
        "inspect.isgeneratorfunction(inspect.unwrap(function))", "False",
    ),
    Mutant(
        "least numbers may be infinite", "arguments.py:check_least",
        "least <= number < math.inf", "least <= number",
    ),
    Mutant(
        "a layer has no heads", "nn/checks.py:check_shape",
        "check_least(1, heads=heads)", "None",
    ),
    Mutant(
        "theta of angles that nobody makes", "nn/checks.py:check_unused",
        "theta != THETA and not rotary", "False",
    ),
    Mutant(
        "a bias may be infinite", "runtime/scores.py:check_bias",
        "_is_seen(bias) and not bool(bias.isfinite().all())", "False",
    ),
    Mutant(
        "no processes are some", "launch.py:started", "check_least(1, nprocs=nprocs)", "None",
    ),
    Mutant(
        "no steps are none said", "routing/router.py:CoordinateDescentRouter.__init__",
        "1 if n_iters is None else n_iters", "n_iters or 1",
    ),
    Mutant(
        "a ring of no ranks is alone", "ranks/ring.py:Ring.__init__",
        "total == 1 and (size is None or size >= 1)", "total == 1",
    ),
]  # fmt: skip
