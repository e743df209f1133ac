"""Generation: keys stay sharded over the ranks, new tokens are the same on all of them.

    prompt       chunk by chunk, each rank computes its shard     keys go to the cache
    last token   on all ranks ─► hidden state, on all ranks
                 the first rank makes logits and samples ─► its tokens go to all ranks
    new token    on all ranks ─► ...

Only the first rank samples, so that rounding and random numbers of a rank cannot make it continue
with other tokens or stop elsewhere.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ring_attention_pytorch.arguments import check_least
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.nn.checks import check_ids
from ring_attention_pytorch.nn.layer_caches import LayerCache, Reading, TokenChunk, caches_of
from ring_attention_pytorch.plan.checks import autocast_dtype
from ring_attention_pytorch.plan.option_types import LayoutName
from ring_attention_pytorch.plan.placement import current
from ring_attention_pytorch.progress import counted
from ring_attention_pytorch.ranks.agreement import agree, error_of, typed
from ring_attention_pytorch.ranks.ring import Ring
from ring_attention_pytorch.runtime.digests import digest
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.top_keys import among_best

_LAYOUT: LayoutName = "zigzag"  # of a chunk of the prompt: equal causal work for all ranks
_BROKEN = -1  # instead of a token if logits are NaN or inf
_COLDEST = 1.2e-38  # lowest temperature: a smaller one has no inverse in float32


class Sampling(NamedTuple):
    """How to choose a token: the largest logit at temperature 0, at random above."""

    temperature: float
    top_k: int | None
    top_p: float | None

    def check(self, seed: int | None) -> None:
        """Raise ValueError if an option is out of range or has no effect."""
        if self.temperature and not _COLDEST <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be 0, which takes the largest, or at least {_COLDEST}, and "
                f"finite, got {self.temperature}"
            )
        given = {"top_k": self.top_k, "top_p": self.top_p, "seed": seed}
        unused = [name for name, value in given.items() if value is not None]
        if self.temperature == 0 and unused:
            raise ValueError(
                f"{', '.join(unused)} need a temperature: at 0 nothing is drawn at random"
            )
        if seed is not None and not -(1 << 63) <= seed < 1 << 64:
            raise ValueError(f"seed must be from -2 ** 63, and below 2 ** 64, got {seed}")
        check_least(1, top_k=self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")

    def choose(self, logits: Tensor, draw: torch.Generator | None = None) -> Tensor:
        """Return a token `[b]` for each row of logits `[b, classes]`.

        It is -1 if a logit of the row is NaN or inf, or all are -inf.

        >>> Sampling(0.0, None, None).choose(torch.tensor([[1.0, 3.0, 2.0]]))
        tensor([1])
        >>> Sampling(9.0, None, 0.4).choose(torch.tensor([[0.0, 30.0, 0.0]]))  # one reaches 0.4
        tensor([1])
        """
        wide = logits.to(accumulation_dtype(logits.dtype))
        largest = wide.amax(-1, keepdim=True)  # NaN if any logit is
        broken = ~largest.isfinite().squeeze(-1)
        wide = wide.masked_fill(broken.unsqueeze(-1), 0.0)
        if self.temperature == 0:
            return wide.argmax(-1).masked_fill(broken, _BROKEN)
        # the largest becomes 0, so that no temperature can overflow
        wide = wide - largest.masked_fill(broken.unsqueeze(-1), 0.0)
        p = (self._kept(wide) / self.temperature).softmax(-1)
        if self.top_p is not None:
            best, order = p.sort(dim=-1, descending=True, stable=True)
            beyond = best.cumsum(-1) - best >= self.top_p
            p = p.scatter(-1, order, best.masked_fill(beyond, 0.0))
        return torch.multinomial(p, 1, generator=draw).squeeze(-1).masked_fill(broken, _BROKEN)

    def _kept(self, logits: Tensor) -> Tensor:
        """Replace all but the `top_k` largest logits by -inf; of equal ones the first are kept."""
        if self.top_k is None or self.top_k >= logits.shape[-1]:
            return logits
        return logits.where(among_best(logits, self.top_k), -torch.inf)


class Decoder(Protocol):
    """A model with caches of the tokens that it has read."""

    def prefill(self, ids: Tensor) -> None:
        """Read a chunk `[b, n]` of the prompt, the same on all ranks."""

    def hidden(self, ids: Tensor) -> Tensor:
        """Read the same token `[b, 1]` on all ranks; return its last hidden state."""
        ...


class CachedTransformer:
    """A `RingTransformer` with the caches of its layers."""

    def __init__(self, model: Any, reading: Reading) -> None:
        self.model: Any = model  # a RingTransformer, which imports this file
        self.ring: Ring = reading.ring
        self.caches: list[LayerCache] = caches_of([attn for attn, _ in model.layers], reading)

    def prefill(self, ids: Tensor) -> None:
        ring, length = self.ring, ids.shape[1]
        mine = positions(_LAYOUT, rank=ring.rank, ring_size=ring.size, length=length)
        mine = mine.to(ids.device)
        self._blocks(ids[:, mine], mine, _LAYOUT, length)

    def hidden(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1], device=ids.device)
        return self._blocks(ids, at, None, len(at))[:, -1]

    def _blocks(self, ids: Tensor, at: Tensor, layout: LayoutName | None, length: int) -> Tensor:
        """Run all blocks on ids; `at` are their positions after the tokens read before.

        `length` is of the ids of all ranks.
        """
        model, at = self.model, at + self.caches[0].length
        tokens, angles = model.token_emb(ids), model.rotary_emb(at)
        chunk = TokenChunk(at, angles, layout, length)
        for (_, ff), cache in zip(model.layers, self.caches):
            tokens = tokens + cache.attend(tokens, chunk)
            tokens = tokens + ff(tokens)
        return tokens


def _report(given: dict[str, Any], error: ValueError) -> None:
    model, size = given.get("self"), given.get("ring_size")
    if isinstance(model, Generation):  # not if the method was called on the class
        ring = model._ring(size if type(size) is int else None)
        agree(ring, _caller(model), {}, check=error)


def _caller(model: object) -> str:
    return f"{type(model).__name__}.generate"


class Generation:
    """A mixin that adds `generate` to a transformer; `_decoder` makes its `Decoder`."""

    @typed(_report)
    @torch.no_grad()
    def generate(
        self: Any,
        ids: Tensor,
        max_new_tokens: int,
        temperature: float | int = 0.0,
        top_k: int | None = None,
        top_p: float | int | None = None,
        eos: int | Sequence[int] | None = None,
        seed: int | None = None,
        prefill_chunk_size: int | None = None,
        *,
        mask: Tensor | None = None,
        ring_size: int | None = None,
        kernel: str | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Continue sequences, with keys and values sharded over the ring.

        Every rank passes the same whole ids and gets the same tokens. Each rank computes its shard
        of each chunk of the prompt, and caches its share of the keys. Layers with a window cache
        only the last keys, if that is less. Attention is that of `forward` in evaluation mode,
        without dropout. In float32 and float64 tokens are the same as on one process.

        Args:
            ids: `[b, n]`, the prompts, the same on all ranks of the ring.
            max_new_tokens: the most tokens to append.
            temperature: logits are divided by it before a token is drawn. 0 takes the largest
                logit; any other value must be at least 1.2e-38.
            top_k: draw among the k largest only, exactly k; of equal logits the first count.
            top_p: draw among the fewest largest whose probabilities sum to at least this.
            eos: tokens that end a sequence; generation stops once all sequences have ended.
            seed: seed of the random numbers; None uses the first rank's default generator.
            prefill_chunk_size: tokens of the prompt that are computed at once, on all ranks
                together; None is all. Smaller chunks need less memory.
            mask: bool `[b, n]`, False where a prompt is padded, on its left. As in `forward`,
                padding counts in positions.
            ring_size: number of consecutive ranks that make one ring; must divide the group. Each
                ring has its own prompts, all of the same shape.
            kernel: kernel of attention to the cache for one token, as for `ring_attn_with_cache`.
            cache_dtype: dtype of cached keys and values, as for `RingCache`. None is the model's
                dtype; `torch.float8_e4m3fn` takes half the memory of 16 bits, and rounds.

        Returns:
            `[b, n + m]`: the prompts, and m <= max_new_tokens tokens. A sequence that has ended
            is filled with the first of `eos`.

        Raises:
            ValueError: an argument is invalid or differs between ranks, the model is not causal,
                or its logits are NaN or inf; on all ranks.
            RingError: a rank has left or is out of step.

        >>> from ring_attention_pytorch import RingTransformer
        >>> sizes = dict(num_tokens=256, dim=16, depth=2, dim_head=8, heads=2)
        >>> model = RingTransformer(**sizes, causal=True)
        >>> model.generate(torch.randint(0, 256, (1, 9)), max_new_tokens=3).shape
        torch.Size([1, 12])
        """
        how = Sampling(temperature, top_k, top_p)
        ends = [eos] if isinstance(eos, int) else list(eos or ())
        numbers = {"max_new_tokens": max_new_tokens, "prefill_chunk_size": prefill_chunk_size}

        def check() -> None:
            self._check_prompt(ids, mask, ends)
            _check_summaries(self, kernel, prefill_chunk_size, cache_dtype)
            check_least(1, **numbers)
            how.check(seed)
            self._check_draws(how, seed)

        error = error_of(check)
        same = {**numbers, "sampling": [*how], "eos": ends, "seed": seed, "kernel": kernel}
        same |= {"cache_dtype": str(cache_dtype)}
        if error is None:
            same["values of ids"] = digest(ids)
            same["values of mask"] = None if mask is None else digest(mask)
        ring = self._ring(ring_size)
        everywhere = {"shape of ids": [*ids.shape], "mask": mask is not None}
        agree(ring, _caller(self), same, everywhere=everywhere, check=error)
        starts = None if mask is None else (~mask).sum(1).tolist()
        (b, n), dtype = ids.shape, autocast_dtype(self.token_emb.weight)
        decoder = self._decoder(
            Reading(
                ring, b, n + max_new_tokens, dtype, ids.device,
                kernel=kernel, starts=starts, cache_dtype=cache_dtype,
            )
        )  # fmt: skip
        chunks = ids[:, :-1].split(prefill_chunk_size or n, dim=1)
        for chunk in counted(chunks, "prompt", n - 1, "tokens", lambda chunk: chunk.shape[1]):
            if chunk.shape[1]:
                decoder.prefill(chunk)
        draw = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
        return self._decoded(ring, decoder, ids, max_new_tokens, ends, how, draw)

    def _decoded(
        self: Any,
        ring: Ring,
        decoder: Decoder,
        ids: Tensor,
        new: int,
        ends: list[int],
        how: Sampling,
        draw: torch.Generator | None,
    ) -> Tensor:
        """Append tokens to ids one by one; the decoder has read all of ids but the last."""
        parts = [ids]
        ended = torch.zeros_like(ids[:, :1], dtype=torch.bool)
        of_ends = torch.tensor(ends, dtype=ids.dtype, device=ids.device)
        for _ in counted(range(new), "generation", new, "tokens"):
            hidden = decoder.hidden(parts[-1][:, -1:].clamp(min=0))
            token = ids.new_empty((len(ids), 1))
            if ring.rank == 0:
                token.copy_(how.choose(self.to_logits(hidden), draw).unsqueeze(1))
            report_to_ring_of_first(ring, token)
            if ends:
                token = token.masked_fill(ended & (token != _BROKEN), ends[0])
                ended = ended | torch.isin(token, of_ends)
            parts.append(token)
            if ends and bool(ended.all()):  # waits for the GPU
                break
        generated = torch.cat(parts, dim=1)
        if bool((generated[:, ids.shape[1] :] == _BROKEN).any()):
            raise ValueError(
                f"{_caller(self)}: logits are NaN or inf; are the model's weights finite?"
            )
        return generated

    def _ring(self: Any, ring_size: int | None) -> Ring:
        return self.spread.ring(self.spread.on(self.force_regular_attn), ring_size)

    def _decoder(self: Any, reading: Reading) -> Decoder:
        return CachedTransformer(self, reading)

    def _check_prompt(self: Any, ids: Tensor, mask: Tensor | None, ends: list[int]) -> None:
        """Raise ValueError if this model can't continue these ids."""
        classes = self.token_emb.num_embeddings
        if not self.causal:
            raise ValueError(
                "the model must be causal: else each new token would change all earlier ones"
            )
        if not len(self.layers):
            raise ValueError("the model has no blocks")
        if current() is not None:
            raise ValueError("ids are whole sequences, call it outside of the block of a batch")
        check_ids(ids, mask, None, classes, self.ignore_index)
        if 0 in ids.shape:
            raise ValueError(f"there must be a prompt of a token at least, got {[*ids.shape]}")
        if mask is not None and not bool((mask[:, 1:] >= mask[:, :-1]).all() & mask[:, -1].all()):
            raise ValueError(
                "mask must be of padding on the left: False before the first token, then True"
            )
        if any(not 0 <= end < classes for end in ends):
            raise ValueError(f"eos must be from 0 to {classes - 1}, got {ends}")

    def _check_draws(self: Any, how: Sampling, seed: int | None) -> None:
        """Raise ValueError if ranks that split heads would draw different tokens."""
        split = any(getattr(module, "split_ranks", ()) for module in self.modules())
        if split and how.temperature > 0 and seed is None:
            raise ValueError("heads are split among ranks that draw by themselves: give a seed")


def _check_summaries(
    model: Any, kernel: str | None, chunk: int | None, dtype: torch.dtype | None
) -> None:
    """Raise ValueError for options that layers with summaries don't support in generation."""
    layers = [m for m in model.modules() if getattr(m, "summaries", None) is not None]
    if not layers:
        return
    if any(attn.softclamp is not None or attn.summaries.rule.select for attn in layers):
        raise ValueError("layers with attn_summaries generate without softclamp and select")
    if (kernel, chunk, dtype) != (None, None, None):
        raise ValueError(
            "layers with attn_summaries read the prompt at once, choose the kernel by themselves "
            f"and keep keys in the model's dtype: leave out prefill_chunk_size={chunk}, "
            f"kernel={kernel!r} and cache_dtype={dtype}"
        )


def report_to_ring_of_first(ring: Ring, ids: Tensor) -> None:
    """Overwrite ids with the ids of the ring's first rank, in place."""
    if ring.size == 1:
        return
    with ring.call("sampled tokens", 0, None):
        others = [(rank, ids) for rank in range(1, ring.size)]
        sends, receives = (others, []) if ring.rank == 0 else ([], [(0, ids)])
        ring.exchange(sends, receives).wait()
