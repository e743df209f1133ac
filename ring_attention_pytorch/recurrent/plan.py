"""The plan of recurrent layers: the runs of all ranks, and how states and halos travel."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from ring_attention_pytorch.arguments import check_least, checked, checks_of
from ring_attention_pytorch.geometry.documents import (
    BatchDocuments,
    Borders,
    check_documents,
    check_end,
    digest,
)
from ring_attention_pytorch.geometry.layouts import Layout, all_segments, check_layout
from ring_attention_pytorch.geometry.segments import Segments
from ring_attention_pytorch.plan.checks import DTYPES, check_shards
from ring_attention_pytorch.plan.known_shards import check_known_shards
from ring_attention_pytorch.plan.option_types import LayoutOption
from ring_attention_pytorch.plan.options import presence
from ring_attention_pytorch.plan.packing import whole_packing
from ring_attention_pytorch.plan.placement import Placement, attention_ring, block_of, placed
from ring_attention_pytorch.plan.ring_plan import RingPlan
from ring_attention_pytorch.ranks.agreement import (
    agree,
    error_of,
    raise_together,
    report_to_group,
    typed,
)
from ring_attention_pytorch.ranks.ring import Caller, Group, Ring
from ring_attention_pytorch.recurrent.levels import Levels
from ring_attention_pytorch.recurrent.runs import (
    HeldRun,
    Runs,
    check_consecutive,
    distances,
    gathers,
)
from ring_attention_pytorch.runtime.streams import capturing
from ring_attention_pytorch.runtime.uncopied import uncopied
from ring_attention_pytorch.tensor_kinds import check_plain, has_values

_CALLER = "recurrent layers"


class Route(NamedTuple):
    """How maps of runs lead to the states before this rank's runs.

    Attributes:
        sent: this rank's runs whose maps travel; counts: how many each rank sends.
        chains: how many documents are followed here.
        starts: which of them begin with a sample's initial state, and the samples.
        levels: which maps are followed, as places among all that travel.
        mine: for each of this rank's runs, its place among the states of all chains.
        ends: samples with tokens, and for each the places of its last run's state and map; None if
            final states are not asked for.
    """

    sent: Tensor
    counts: tuple[int, ...]
    chains: int
    starts: tuple[Tensor, Tensor]
    levels: Levels
    mine: Tensor
    ends: tuple[Tensor, Tensor, Tensor] | None


class HaloRoute(NamedTuple):
    """How the tokens before each run travel.

    Attributes:
        sends: for each rank, the tokens that it needs, in `[b * n]`.
        lands: for each rank, the places of its tokens in `[runs * width]`.
        tokens: places of this rank's tokens, each run after its halo, in the sequence of all
            `[b * n]` tokens and then all `[runs * width]` of halos.
        outputs: for each token, its place in that sequence, less the `width` before its own.
    """

    sends: tuple[Tensor, ...]
    lands: tuple[Tensor, ...]
    tokens: Tensor
    outputs: Tensor


@uncopied
@dataclass(frozen=True, eq=False)
class RunPlan:
    """The part of recurrent layers that depends on ranks, lengths and documents, not on values.

    Make it once per batch with `RunPlan.make`, or from attention's plan with `RunPlan.of`, and pass
    it to every layer. Ranks exchange notes when it is made, and once for each kind of call: shapes,
    options, and inputs that need gradients.
    """

    ring: Ring
    runs: Runs
    device: torch.device
    _agreed: dict[tuple[Any, ...], Caller] = field(default_factory=dict, init=False, repr=False)
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    # batches with these runs, in whose blocks this was used
    _placements: WeakSet[Placement] = field(default_factory=WeakSet, init=False, repr=False)

    @classmethod
    @typed(report_to_group(_CALLER, ring_of=attention_ring), apart=True)
    def make(
        cls,
        x: Tensor,
        *,
        layout: LayoutOption = "contiguous",
        documents: Tensor | BatchDocuments | None = None,
        cu_seqlens: Borders | None = None,
        group: Group = None,
    ) -> "RunPlan":
        """Make a plan for tokens like these; all ranks of the ring must call this together.

        Args:
            x: `[b, n, ...]`, like this rank's tokens; values don't matter. n may be 0.
            layout: "contiguous", "zigzag" or a layout that `balanced` made.
            documents, cu_seqlens: where documents are, as for `ring_attn`. States begin anew there.
            group: the ring; None is the default group, or the ring of the batch's block.

        Raises:
            ValueError: an argument is invalid or differs between ranks, or the layout is striped;
                same text on all ranks.

        >>> RunPlan.make(torch.randn(1, 6, 4), cu_seqlens=[0, 2, 6]).runs.held[0][1].position
        0
        """
        ring = attention_ring(group)
        given: dict[str, Any] = dict(layout=layout, documents=documents, cu_seqlens=cu_seqlens)
        found: list[Any] = []

        def check() -> None:
            check_plain("x", x)
            if x.ndim < 2:
                raise ValueError(f"x must be [batch, tokens, ...], got {list(x.shape)}")
            options = placed(ring, x, given)
            check_layout(options["layout"])
            check_known_shards(ring, {"x": x}, options["layout"])
            check_documents(options.get("documents"), options.get("cu_seqlens"), x.shape)
            found.append(options)

        error = error_of(check)  # raised in the agreement
        options = found[0] if found else given
        packed = options.get("documents")
        same = {
            "batch": x.shape[0] if x.ndim else None,
            "layout": options["layout"],
            "documents": None if packed is None else presence(packed),
            "cu_seqlens": None if error else digest(options.get("cu_seqlens")),
        }
        n = x.shape[1] if x.ndim > 1 else 0
        counts = [rank["n"] for rank in agree(ring, _CALLER, same, {"n": n}, error)]
        segments = _segments(ring, options["layout"], counts, options.get("cu_seqlens"))
        packing = whole_packing(ring, packed, options.get("cu_seqlens"), segments, x.shape[0])
        return cls(ring, Runs.of(segments, packing, x.shape[0]), x.device)

    @classmethod
    @checked
    def of(cls, plan: RingPlan) -> "RunPlan":
        """Return the plan for the tokens of attention's plan; nothing is exchanged.

        Raises:
            ValueError: the layout is striped; on all ranks alike.

        >>> q = torch.randn(1, 6, 2, 4)
        >>> RunPlan.of(RingPlan.make(q, q, q, causal=True)).runs.tokens
        (6,)
        """
        made = plan._own.made  # layers share it
        if "recurrent" not in made:
            runs = Runs.of(plan.query_segments, plan.packing, plan.signature[0])
            made["recurrent"] = cls(plan.ring, runs, plan.device)
        return made["recurrent"]

    @property
    def mine(self) -> tuple[HeldRun, ...]:
        """The runs of this rank."""
        return self.runs.held[self.ring.rank]

    @checked
    def explain(self, heads: int, d_k: int, d_v: int) -> str:
        """Describe this rank's runs, and the bytes that a delta rule with such heads exchanges.

        Nothing is sent; any rank can call this alone.

        Raises:
            ValueError: a number is below 1.

        >>> print(RunPlan.make(torch.randn(1, 6), cu_seqlens=[0, 2, 6]).explain(2, 4, 4))
        rank 0 of 1: 6 tokens, runs of document 0: 0-1; document 1: 0-3
        no map of a run is sent
        """
        with checks_of("RunPlan.explain"):
            check_least(1, heads=heads, d_k=d_k, d_v=d_v)
        places = [f"{run.position}-{run.position + run.length - 1}" for run in self.mine]
        where = [f"document {run.document}: {at}" for run, at in zip(self.mine, places)]
        tokens = self.runs.batch * self.runs.tokens[self.ring.rank]
        head = f"rank {self.ring.rank} of {self.ring.size}: {tokens} tokens, runs of "
        counts = [len(self.runs.sent(rank, False)) for rank in range(self.ring.size)]
        if not sum(counts):
            return f"{head}{'; '.join(where) or 'none'}\nno map of a run is sent"
        each = heads * d_k * (d_k + d_v) * 4 / 1e6
        then = "all ranks store them all"
        if not gathers(self.ring.size):
            then = f"ranks compose them in {len(distances(self.runs))} doublings"
        return (
            f"{head}{'; '.join(where) or 'none'}\nmaps of runs: {counts[self.ring.rank]} of "
            f"{sum(counts)} are sent from here, {each:.3g} MB each; {then}"
        )

    def agree_once(self, caller: str, **same: Hashable) -> Caller:
        """Agree with the other ranks on values, in the first call with them.

        The number of that agreement is in the messages of all calls with them, so that they match
        no messages of another plan, or of calls with other values.

        Raises:
            ValueError: they differ, or this call is captured in a CUDA graph; the same text on all
                ranks.
        """
        key = caller, *same.items()
        if key not in self._agreed:
            self._check_capture()
            agree(self.ring, caller, same)
            self._agreed[key] = Caller(self.ring, caller, self.ring.steps.notes)
        return self._agreed[key]

    def _check_capture(self) -> None:
        """Raise ValueError if a CUDA graph is being captured: tables can't be made then."""
        if self.device.type == "cuda" and capturing(self.device):
            raise self.error(
                f"{_CALLER}: a CUDA graph can't capture the first call of a kind, in which tables "
                "are made; call it once before the capture, with this plan"
            )

    def check_tokens(self, caller: str, **tensors: Tensor | None) -> None:
        """Raise ValueError if any tensor is not `[b, n, ...]` of the plan's tokens and device.

        In the block of a batch the plan must have its runs.
        """
        want = self.runs.batch, self.runs.tokens[self.ring.rank]
        given = {name: t for name, t in tensors.items() if t is not None}
        for name, t in given.items():
            self._check_plain(caller, name, t)
            if not has_values(t):  # tables that it would make are kept
                raise self.error(
                    f"{caller}: {name} must have values, got a {type(t).__name__} on {t.device}"
                )
            if tuple(t.shape[:2]) != want or t.device != self.device:
                raise self.error(
                    f"{caller}: {name} must be {[*want]} and more on {self.device} by the plan, "
                    f"got {list(t.shape)} on {t.device}"
                )
        block = block_of(next(iter(given.values())))  # the others have as many tokens
        if block is not None:
            self._check_block(caller, block)

    def _check_block(self, caller: str, block: Placement) -> None:
        """Raise ValueError if the batch in whose block this is used has other runs."""
        if block in self._placements or (self.ring.size == 1 < block.ring.size):
            return

        def check() -> None:
            block.check_ranks(self.ring)
            segments = all_segments(block.layout, block.ring.size, block.length)
            if Runs.of(segments, block.packing, self.runs.batch) != self.runs:
                raise ValueError(
                    "the plan is of another layout or of other documents than the batch in whose "
                    "block it is used; make it inside the block"
                )

        if (error := error_of(check)) is not None:
            raise self.error(f"{caller}: {error}")
        self._placements.add(block)

    def check_numbers(self, caller: str, like: Tensor, **tensors: Tensor | None) -> None:
        """Raise ValueError if a tensor isn't dense, or loses digits beside `like`.

        It does if it isn't floating, or if it is float64 and `like` is not. It must be on the
        plan's device.
        """
        allowed = DTYPES if like.dtype == torch.float64 else DTYPES[1:]  # the widest comes first
        for name, t in tensors.items():
            if t is None:
                continue
            self._check_plain(caller, name, t)
            if t.dtype not in allowed or t.device != self.device:
                raise self.error(
                    f"{caller}: {name} must be floating, at most {allowed[0]}, and on "
                    f"{self.device}, got {t.dtype} on {t.device}; cast it"
                )

    def _check_plain(self, caller: str, name: str, t: Tensor) -> None:
        """Raise ValueError unless a tensor is a plain dense one without a transform around it."""

        def check() -> None:
            check_plain(name, t)
            if self.ring.size > 1 and is_functorch_wrapped_tensor(t):
                raise ValueError(
                    f"{name} is transformed by torch.func, which recurrent layers don't take; use "
                    "backward() or torch.autograd.grad"
                )

        if (error := error_of(check)) is not None:
            raise self.error(f"{caller}: {error}")

    def error(self, text: str) -> ValueError:
        """Return an error of this rank alone; ranks that wait for it are notified."""
        error = ValueError(text)
        self.ring.report_failure(error)
        return error

    @cached_property
    def number_of(self) -> dict[HeldRun, int]:
        """The number of each of this rank's runs, in the order held."""
        return {run: number for number, run in enumerate(self.mine)}

    def indices(self, numbers: Sequence[int]) -> Tensor:
        """Return numbers as int64 on the plan's device, to index tensors."""
        return torch.tensor(numbers, dtype=torch.long, device=self.device)

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The first token of each of this rank's runs in `[b * n]`, and the number of tokens."""
        n = self.runs.tokens[self.ring.rank]
        return [(run.sample * n + run.start, run.length) for run in self.mine]

    @cached_property
    def run_of_token(self) -> Tensor:
        """The number of each token's run, int64 `[b * n]`."""
        lengths = torch.tensor([length for _, length in self.spans], dtype=torch.long)
        with torch.inference_mode(False):  # training could not use it
            return torch.arange(len(lengths)).repeat_interleave(lengths).to(self.device)

    def route(self, final: bool = False) -> Route:
        """Return how states reach this rank's runs."""
        return self.once(("states", final), lambda: _route(self, final))

    def halo_route(self, width: int) -> HaloRoute:
        """Return how the `width` tokens before each run travel."""
        return self.once(("halo", width), lambda: _halo_route(self, width))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return `make()`, cached by this key."""
        if key not in self._made:
            self._check_capture()
            with torch.inference_mode(False):  # training could not use what it made
                self._made[key] = make()
        return self._made[key]


def needs_gradients(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Return for each tensor whether backward comes to it; ranks must agree on that.

    >>> needs_gradients(torch.ones(1, requires_grad=True), torch.ones(1), None)
    (True, False, False)
    """
    grad = torch.is_grad_enabled()
    return tuple([grad and t is not None and t.requires_grad for t in tensors])


def runs_of_batch(batch: Any, device: torch.device, samples: int) -> RunPlan:
    """Return the plan for the tokens of a `ShardedBatch`; nothing is exchanged.

    Raises:
        ValueError: the layout is striped; on all ranks alike.
    """
    segments = all_segments(batch.layout, batch.ring_size, batch.length)
    return RunPlan(batch.ring, Runs.of(segments, batch.packing, samples), device)


def _segments(
    ring: Ring, layout: Layout, counts: Sequence[int], cu_seqlens: Borders | None
) -> tuple[Segments, ...]:
    """Return every rank's segments; raise ValueError on all ranks if lengths don't fit them."""
    found: list[tuple[Segments, ...]] = []

    def check() -> None:
        segments = check_shards(layout, counts)
        check_consecutive(segments)
        check_end(cu_seqlens, sum(counts))
        found.append(segments)

    raise_together(ring, _CALLER, check)
    return found[0]


def _route(plan: RunPlan, final: bool) -> Route:
    runs, rank = plan.runs, plan.ring.rank
    sent = [runs.sent(each, final) for each in range(len(runs.held))]
    map_at: dict[HeldRun, int] = {}  # places among all maps that travel
    for each, numbers in enumerate(sent):
        for number in numbers:
            map_at[runs.held[each][number]] = len(map_at)
    ends = [run for run in runs.ends() if run is not None] if final else []
    depth: dict[int, int] = {}  # states of each chain that this rank needs
    for run in (*plan.mine, *ends):
        chain, level = runs.links[run]
        depth[chain] = max(depth.get(chain, 0), level + 1)
    state_at: dict[HeldRun, int] = {}  # places among the states of all chains
    chains: list[list[int]] = []
    starts, samples = [], []  # chains that begin with a sample's initial state
    for chain, states in depth.items():
        followed = runs.chains[chain][:states]
        state_at |= {run: len(state_at) + level for level, run in enumerate(followed)}
        sample = runs.begins(followed[0])
        if sample is not None:
            starts.append(len(chains))
            samples.append(sample)
        chains.append([map_at[run] for run in followed[:-1]])
    last = None
    if final:
        last = (
            plan.indices([run.sample for run in ends]),
            plan.indices([state_at[run] for run in ends]),
            plan.indices([map_at[run] for run in ends]),
        )
    return Route(
        sent=plan.indices(sent[rank]),
        counts=tuple(map(len, sent)),
        chains=len(chains),
        starts=(plan.indices(starts), plan.indices(samples)),
        levels=Levels.of(chains, plan.device),
        mine=plan.indices([state_at[run] for run in plan.mine]),
        ends=last,
    )


def _halo_route(plan: RunPlan, width: int) -> HaloRoute:
    rank, size, runs = plan.ring.rank, plan.ring.size, plan.runs
    sends: list[list[int]] = [[] for _ in range(size)]
    lands: list[list[int]] = [[] for _ in range(size)]
    for run, place, owner, index in runs.before(width):
        if owner.rank == rank:
            token = owner.sample * runs.tokens[rank] + owner.start + index
            sends[run.rank].append(token)
        if run.rank == rank:
            lands[owner.rank].append(plan.number_of[run] * width + place)
    total = runs.batch * runs.tokens[rank]
    tokens: list[int] = []
    outputs = [0] * total
    for number, (first, length) in enumerate(plan.spans):
        halo = total + number * width
        outputs[first : first + length] = range(len(tokens), len(tokens) + length)
        tokens += [*range(halo, halo + width), *range(first, first + length)]
    return HaloRoute(
        sends=tuple(map(plan.indices, sends)),
        lands=tuple(map(plan.indices, lands)),
        tokens=plan.indices(tokens),
        outputs=plan.indices(outputs),
    )
