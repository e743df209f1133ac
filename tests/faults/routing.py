"""Faults planted into conditional routing, and a battery that must find each."""

from collections.abc import Callable, Iterable

from tests.faults import hunt
from tests.faults.mutant import planted

MUTANTS = planted("ROUTING")
ANSWERS_FOR = ("routing/",)


def battery() -> Iterable[Callable[[], None]]:
    """Cases that fail where something is wrong."""
    import torch

    from tests.routing import test_router as router
    from tests.routing import test_selection as selection
    from tests.routing import test_soft_topk as topk
    from tests.stories import test_routed_modules as modules
    from tests.support.routing_cases import MODULES, Case, check_in_threads

    torch.set_num_threads(1)
    for name in ("feedforward", "causal feedforward", "attention", "autoregressive"):
        yield lambda name=name: modules.test_a_module_equals_loops_over_its_tokens(name, 17, True)
    yield lambda: topk.test_descent_is_the_published_one_gradients_included(7, (0.03, 4.0, 0.7))
    yield selection.test_selection_leaves_slots_empty_where_too_few_are_real
    for number, name in enumerate(MODULES):
        layout = ("contiguous", "zigzag", "striped")[number % 3]
        case = Case(name, modules.length_of(name), layout)
        yield lambda case=case: check_in_threads(case, 3)
    yield lambda: modules.test_equal_tokens_are_routed_alike_on_any_ring("striped")
    yield lambda: modules.test_no_token_is_moved_by_a_later_one("causal block", False)
    yield lambda: router.test_a_router_by_cosines_is_that_of_the_definition(3, 0.5)
    yield lambda: modules.test_a_ring_of_threads_gives_what_loops_over_tokens_do("cross", True)
    for name in ("image", "attention"):
        yield lambda name=name: modules.test_masked_tokens_are_never_seen_or_routed(name)
    yield modules.test_tokens_in_equal_surroundings_are_ties_on_any_ring
    yield rotary_is_by_real_positions


def rotary_is_by_real_positions() -> None:
    """Where tokens are differs from where they stand among those routed."""
    import torch

    from tests.support.routing_cases import Case

    case = Case("attention to sets", masked=False)
    module, x = case.make(), case.data()["x"]
    module.light_attn = None
    far = torch.cat((x[:, :12], torch.zeros_like(x[:, :9]), x[:, 12:]), 1)
    real = torch.ones(2, 32, dtype=torch.bool)
    real[:, 12:21] = False
    moved = module(far, mask=real)[real].view(x.shape) - module(x)
    assert moved.abs().max() > 1e-6


if __name__ == "__main__":
    hunt.main("tests.faults.routing")
