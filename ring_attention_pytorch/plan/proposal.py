"""A rank's part in the agreement on a plan: its arguments, and their errors.

Nothing here waits for another rank. Every error is raised here, and reported to all ranks in the
agreement, so that none of them is left waiting.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attention_pytorch.kernels import (
    choose,
    fewest_launches,
    for_long_documents,
    for_short_documents,
)
from ring_attention_pytorch.plan.checks import (
    agreed_shapes,
    check_encoded,
    check_qkv,
    like_autocast,
)
from ring_attention_pytorch.plan.options import Call, Options
from ring_attention_pytorch.ranks.agreement import MustMatch
from ring_attention_pytorch.runtime.codec import Codec, values_like
from ring_attention_pytorch.runtime.dropout import own_seed
from ring_attention_pytorch.runtime.interfaces import KernelRequest, SelectedKernel, Traits
from ring_attention_pytorch.runtime.scores import (
    columns,
    widened,
)
from ring_attention_pytorch.schedule.hardware import number_of

MOST_MEMORY = 8 << 30  # bytes at most for peers' keys if neither transport nor memory is given


class Proposal(NamedTuple):
    """A rank's proposal for a plan; an empty one if its arguments are wrong.

    Ranks compare `must_match`; `own` may differ. `shaped` are q, k and v as kernels will get them,
    perhaps without memory.
    """

    must_match: MustMatch = MustMatch()
    own: Mapping[str, int] = {}  # never changed
    options: Options = Options()
    scale: float = 1.0
    kernel: SelectedKernel | Any = None  # None of an empty one
    fewest_launches: SelectedKernel | None = None  # for few tokens, if none is named
    for_short: SelectedKernel | None = None  # for short documents, likewise
    for_long: SelectedKernel | None = None  # for a few long ones, a call for each, likewise
    shaped: tuple[Tensor, ...] = ()
    shared: "Proposal | None" = None  # of the same queries, and keys that all ranks hold
    codec: Codec | None = None  # which encodes k and v

    @classmethod
    def of(cls, call: Call, given: Mapping[str, Any], also: Mapping[str, Any]) -> "Proposal":
        """Check options, by name, for such a call; `also` must be the same on all ranks, too.

        Raises:
            ValueError: tensors or options are wrong, or the kernel can't do it.
        """
        options = Options.read(given)
        q, k, v = map(like_autocast, call[:3])
        like = Call(q, k, v, *call[3:])
        if call.codec is None:
            check_qkv(q, k, v)
        else:
            check_encoded(q, k, v, call.codec)
            check_coded(call.codec, options)
        options.check_for(like)
        return cls._of_checked(like, options, also)

    @classmethod
    def _of_checked(cls, call: Call, options: Options, also: Mapping[str, Any]) -> "Proposal":
        """Make the proposal after all checks; raise ValueError if the kernel can't do it."""
        q, k, v, size, codec = call
        scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
        shapes = agreed_shapes(q, k, v)  # without columns of a bias, which ranks name themselves
        agreed = options.agreed()
        bias_columns = 0
        if options.key_bias is not None:
            bias_columns = columns(q, k, options.key_bias)
            q, k = widened(q, bias_columns), widened(k, bias_columns)
        shared, options = cls._shared(q, options, scale, bias_columns)
        values = v if codec is None else values_like(codec, v)
        request = KernelRequest.of(q, values, **options.features(), packed=options.packed)
        kernel = choose(options.kernel, request)
        light = short = long = None
        if codec is not None:  # it decodes before each call: no call overlaps another
            kernel = kernel._replace(traits=Traits(square=kernel.traits.square))
        elif options.kernel is None:
            light = fewest_launches(request) if size > 1 else None
            pieces = request._replace(packed=options.packed or options.placed)
            short, long = for_short_documents(pieces), for_long_documents(request)
        room = 0
        if options.transport is None and options.memory is None:
            room = memory_left(q, size)
        seed = own_seed(options.dropout_seed) if options.dropout else 0
        same = {
            "codec": "none, keys as they are" if codec is None else str(codec),
            **also,
            **shapes,
            **agreed,
            "kernel chosen": kernel.name,
            "kernel for few tokens (none if kernel= is named)": light and light.name,
            "kernel for short documents (likewise)": short and short.name,
            "kernel for a few long documents (likewise)": long and long.name,
        }
        everywhere = {
            "device": q.device.type,
            **options.agreed(everywhere=True),
            "query_positions and key_positions": "given" if options.placed else None,
        }
        own = {"n": q.shape[1], "m": k.shape[1], "seed": seed, "room": room, **_facts(q)}
        return cls(
            MustMatch(same, everywhere), own, options, scale, kernel, fewest_launches=light,
            for_short=short, for_long=long, shaped=(q, k, v), shared=shared, codec=codec,
        )  # fmt: skip

    @classmethod
    def _shared(
        cls, q: Tensor, options: Options, scale: float, bias_columns: int
    ) -> tuple["Proposal | None", Options]:
        """Return the proposal for keys that all ranks hold, if any, and options without memory.

        Plans of such calls are cached; they must not hold a layer's queries and keys. These keys
        have `bias_columns` columns, as q has, where the ring's have a bias.
        """
        if options.shared_keys is None:
            return None, options
        k, v = map(like_autocast, options.shared_keys)
        q, k, v = widened(q, 0), widened(k, bias_columns), widened(v, 0)
        alone = Options(
            key_mask=options.shared_key_mask,
            cross=True,
            scale=scale,
            softclamp=options.softclamp,
            kernel=options.kernel,
            bucket_size=options.bucket_size,
        )
        return cls._of_checked(Call(q, k, v, 1), alone, {}), replace(options, shared_keys=(k, v))


def check_coded(codec: Codec, options: Options) -> None:
    """Raise ValueError if options are given that need keys and values as they are."""
    given = [name for name in ("key_bias", "shared_keys") if getattr(options, name) is not None]
    if given:
        raise ValueError(
            f"{' and '.join(given)} need keys and values that travel as they are, "
            f"got {codec}; expand them and call ring_attn"
        )


def _facts(like: Tensor) -> dict[str, int]:
    """Return the number of this rank's device, on which plans on GPUs depend."""
    if not like.is_cuda:
        return {}
    return {"device": number_of(torch.cuda.get_device_name(like.device))}


def memory_left(like: Tensor, ring_size: int) -> int:
    """Return the bytes that peers' keys may take here: on a GPU at most half of the free ones.

    They are rounded down to a power of two, because they decide in which groups owners' keys
    arrive. They are not used with deterministic algorithms, nor with two ranks, where one owner's
    keys arrive in any case. The query takes 25 to 50 us.
    """
    if ring_size <= 2 or not like.is_cuda or torch.are_deterministic_algorithms_enabled():
        return MOST_MEMORY
    free = torch.cuda.mem_get_info(like.device)[0]
    if free >= 2 * MOST_MEMORY:
        return MOST_MEMORY
    stats = torch.cuda.memory_stats_as_nested_dict(like.device)  # flat they take ten times longer
    reserved = stats["reserved_bytes"]["all"]["current"]
    allocated = stats["allocated_bytes"]["all"]["current"]
    half = (free + reserved - allocated) // 2
    return min(MOST_MEMORY, 1 << half.bit_length() >> 1)
