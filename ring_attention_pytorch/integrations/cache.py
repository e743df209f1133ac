"""A cache for transformers' `model.generate` whose keys stay spread over the ranks.

    mask function    gets the number of keys from the cache; its mask refers to the cache
    cache.update     returns new tokens' keys, or latents, unchanged, and notes them for attention
    attention        appends them to a `RingCache`, and attends to all cached keys

All ranks compute all tokens, except in attention, where each rank attends to the keys it stores.
`RingHFCache.prefill` computes a prompt beforehand, a part of it on each rank.
"""

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Final, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig

from ring_attention_pytorch.arguments import check_least
from ring_attention_pytorch.geometry.layouts import all_segments, count, segment_positions
from ring_attention_pytorch.inference.attention import ring_attn_with_cache
from ring_attention_pytorch.inference.cache import RingCache
from ring_attention_pytorch.inference.model_cache import SPARE, model_cache
from ring_attention_pytorch.integrations.cache_layers import (
    KeysLayer,
    States,
    cache_layers,
    chunk_of,
    states_of,
)
from ring_attention_pytorch.integrations.calls import check_call, names
from ring_attention_pytorch.integrations.latents import Pair, absorb, check_expanded, expand
from ring_attention_pytorch.integrations.layers import check_layers, windows_of
from ring_attention_pytorch.integrations.masks import Visible, visible_by
from ring_attention_pytorch.integrations.recurrent import (
    check_next_parts,
    recurrent_layers,
    spread_chunk,
)
from ring_attention_pytorch.nn.sharding import shard_sequence, unshard_sequence
from ring_attention_pytorch.plan.placement import current
from ring_attention_pytorch.progress import counted
from ring_attention_pytorch.ranks.agreement import Check, agree, error_of, report_to_group, typed
from ring_attention_pytorch.ranks.ring import Group, Ring, as_ring
from ring_attention_pytorch.runtime.digests import digest

_LAYOUT: Final = "zigzag"  # of tokens that are spread: a prompt's chunk, or many new tokens
_FEW = 16  # new tokens per rank; with more of them, queries are spread as well where possible
_CALLER = "RingHFCache"
_PREFILL = f"{_CALLER}.prefill"


def _report_prefill(given: dict[str, Any], error: ValueError) -> None:
    """Raise the error of one rank's arguments on all ranks that prefill a cache."""
    agree(given["self"].ring, _PREFILL, {}, check=error)


class RingHFCache(Cache):
    """A cache for `model.generate(ids, past_key_values=cache)`, with a part of it on each rank.

    The model needs `attn_implementation="ring"`. All ranks call `generate` with the same arguments
    and get the same tokens: by greedy search, sampling, beams or assisted decoding, with prompts
    padded on the left, and with `prefill_chunk_size`. To sample, seed all ranks alike with
    `transformers.set_seed`; each call of the model compares the ranks' tokens.

    Args:
        config: `model.config`.
        capacity: the most tokens of a sequence; their memory is allocated at once. None allocates
            memory as needed.
        page: consecutive tokens on one rank before the next rank stores some.
        dtype: of the cached keys and values; None is the model's dtype. `torch.float8_e4m3fn` takes
            half the memory of 16 bits, and rounds.
        spare: layers with a window in the config store `window + 2 * spare` tokens, if that is
            fewer than all. Up to `spare` tokens can be removed again, by assisted decoding or
            `crop`. None stores all tokens in all layers.
        kernel: of attention of few new tokens, as for `ring_attn_with_cache`; if named, of many.
        check_tokens: check in each call of the model that all ranks have the same tokens, and that
            they are the next tokens of the sequence.
        group: the ring; None is the default group.

    Attributes:
        keys: the `RingCache`; None before the first tokens.

    Raises:
        ValueError: the model has another attention, or layers that are not attention. When the
            model runs: a mask that is not causal, sliding or padding on the left, dropout, or
            gradients.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from ring_attention_pytorch.integrations.transformers import register
    >>> register()
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, vocab_size=9)
    >>> heads = dict(num_attention_heads=2, num_key_value_heads=1)
    >>> config = LlamaConfig(**sizes, **heads, attn_implementation="ring")
    >>> model, ids = LlamaForCausalLM(config), torch.tensor([[4, 5, 6]])
    >>> cache = RingHFCache(config)
    >>> options = dict(max_new_tokens=3, eos_token_id=None, pad_token_id=0)
    >>> model.generate(ids, past_key_values=cache, **options).shape, cache.get_seq_length()
    (torch.Size([1, 6]), 5)
    """

    @typed(report_to_group(_CALLER))
    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        capacity: int | None = None,
        page: int = 64,
        dtype: torch.dtype | None = None,
        spare: int | None = SPARE,
        kernel: Literal["triton", "eager"] | None = None,
        check_tokens: bool = True,
        group: Group = None,
    ):
        self.ring: Ring = as_ring(group)
        # the text model's config, whose class depends on the model
        self.config: Any = config.get_text_config(decoder=True)
        self.sizes: dict[str, Any] = {"capacity": capacity, "page": page, "spare": spare}
        same = self.sizes | {"dtype": str(dtype), "kernel": kernel, "check": check_tokens}
        layers = cache_layers(self.config, self)
        self._states: list[States] = states_of(layers)
        with_keys = [number for number, layer in enumerate(layers) if isinstance(layer, KeysLayer)]
        # the place in the `RingCache` of each layer with keys
        self._places: dict[int, int] = {number: i for i, number in enumerate(with_keys)}
        agree(self.ring, _CALLER, same, check=self._check_model)
        self.dtype: torch.dtype | None = dtype
        windows = windows_of(self.config)
        self.windows: list[int | None] = [
            None if spare is None else windows[number] for number in with_keys
        ]
        self.kernel = kernel
        self.check_tokens = check_tokens
        self.keys: RingCache | None = None
        self._starts: list[int] | None = None
        # by layer: new keys and values, or latents of both, until its attention runs
        self._new: dict[int, tuple[Tensor, Tensor]] = {}
        self._chunk: int | None = None  # tokens of a prompt's chunk that is spread over ranks
        super().__init__(layers=layers)

    # ---- called by transformers

    def length(self, layer: int) -> int:
        """Return the number of a layer's tokens, over all ranks."""
        return 0 if self.keys is None else self.keys.lengths_in(self._places[layer])[0]

    @property
    def read(self) -> int:
        """The number of tokens, over all ranks."""
        return 0 if self.keys is None else self.keys.lengths_in(0)[0]

    def expect(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Note a layer's new keys and values, or its latents, for its next attention."""
        if self._new:
            self._fail(
                f"keys of layer {min(self._new)} were left out: its attention is another one"
            )
        self._ensure(self._check_name)
        self._new[layer] = k, v

    def mask(self, function: Any, given: Tensor | None, kv_length: int) -> "CachedMask":
        """Return the mask for attention, from a mask function over `kv_length` keys."""
        visible = visible_by(function)
        problem = None if visible.causal else "the mask is not causal"
        if current() is not None:
            problem = "it is used in the block of a batch, whose tokens are spread already"
        starts = None
        if given is not None:
            seen, first = given.sum(1).tolist(), (~given).cumprod(1).sum(1).tolist()
            starts = [min(n, kv_length) for n in first]
            if given.shape[1] != kv_length or [m + n for m, n in zip(seen, starts)] != [
                kv_length
            ] * len(given):
                problem = (
                    f"attention_mask must be of all {kv_length} tokens, with padding on the left "
                    f"only, got {[*given.shape]}"
                )
        if problem is not None:
            self._fail(problem)
        return CachedMask(self, visible, starts)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: it is positive (once the length to keep); or it removes more than `spare`
                tokens, and layers with a window lack tokens that would be visible again.
        """
        n = -int(tokens_to_remove)  # it can be a tensor
        if n < 0:
            raise ValueError(f"{_CALLER}: crop takes minus the tokens to forget, got {-n}")
        if n and self._states:
            raise ValueError(
                f"{_CALLER}: states of recurrent layers have no token less, so none can be removed"
            )
        if self.keys is not None and n:
            self.keys.rollback(n)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace sequence i by sequence `beam_idx[i]`; full pages are shared, not copied."""
        for layer in self._states:
            layer.reorder(beam_idx)
        if self.keys is not None:
            beams = beam_idx.tolist()
            self.keys.reorder(beams)
            if self._starts is not None:
                self._starts = [self._starts[i] for i in beams]

    def reset(self) -> None:
        """Remove all tokens, and free their memory."""
        self.keys, self._starts = None, None
        self._new.clear()
        for layer in self._states:
            layer.forget()

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Raise ValueError: the number of sequences is fixed."""
        raise ValueError(f"{_CALLER}: the number of sequences is fixed by the first call")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Raise ValueError: the number of sequences is fixed."""
        raise ValueError(f"{_CALLER}: the number of sequences is fixed by the first call")

    # ---- attention

    def _latents(self, layer: nn.Module, qkv: tuple[Tensor, Tensor, Tensor]) -> Pair | None:
        """Return the latents from which a layer expanded its new keys; None if it cached keys.

        Raises:
            ValueError: it attends to keys that it has not given to the cache in either form.
        """
        number: Any = layer.layer_idx
        given = self._new.pop(number, None)
        if given is not None and given[0] is qkv[1]:
            return None
        if given is None or not hasattr(type(layer), "expand_kv"):
            self._fail(_other_keys(number, given))
        new = self.length(number) == 0
        self._ensure(partial(check_expanded, layer, qkv, given, new))
        return given

    def attend(
        self,
        layer: int,
        qkv: tuple[Tensor, Tensor, Tensor],
        at: tuple[list[int] | None, Tensor | None],
        options: dict[str, Any],
        tied: bool,
    ) -> Tensor:
        """Append new tokens' k and v `[b, h, n, d]`; return attention of q, `[b, n, h, d]`.

        `at` has each sequence's first token after its padding, and the positions `[b, n]`. In a
        tied cache v are the first numbers of k.
        """
        k = qkv[1]
        number, layer = layer, self._places[layer]
        keys = self._ready(k, qkv[2], at[0], tied)
        check = partial(keys.memory(layer).check_window, options["window"], 0, new=True)
        self._ensure(check, f"layer {number}: {{}}; with spare=None all tokens of it are kept")
        q, k, *own = (t.transpose(1, 2).to(keys.taken_as(t.dtype)) for t in qkv)
        v = None if keys.tied else own[0]
        options |= {"layer": layer}
        if layer == 0:
            self._ensure(keys.even_lengths)  # an error may have ended a call half way
        if self._chunk is not None:
            return _out(ring_attn_with_cache(q, k, v, keys, layout=_LAYOUT, **options))
        if layer == 0 and self.check_tokens:
            same = {"tokens (by their keys; when sampling, seed all ranks alike)": digest(k)}
            check = partial(self._check_places, k, *at)
            agree(self.ring, _CALLER, same if self.ring.size > 1 else {}, check=check)
        n = q.shape[1]
        few = n < _FEW * self.ring.size or options["window"] is not None or keys.has_starts
        if few or self.kernel is not None:
            return _out(ring_attn_with_cache(q, k, v, keys, kernel=self.kernel, **options))
        how: dict[str, Any] = dict(layout=_LAYOUT, group=self.ring)
        q, k = (shard_sequence(t, **how) for t in (q, k))
        v = None if v is None else shard_sequence(v, **how)
        out = ring_attn_with_cache(q, k, v, keys, layout=_LAYOUT, **options)
        return unshard_sequence(_out(out), length=n, **how)

    def _ready(self, k: Tensor, v: Tensor, starts: list[int] | None, tied: bool) -> RingCache:
        """Return the `RingCache`, allocated on first use, with padding before `starts` hidden."""
        b, heads, _, d = k.shape
        if self.keys is None:
            dtype = self.dtype or k.dtype
            if tied and dtype.itemsize == 1:
                self._fail(
                    f"latents can't be kept in {dtype}: keys and values would have scales of their "
                    "own, so each would be held twice; take a dtype of 16 bits, or None"
                )
            self.keys = model_cache(
                self.windows, b, heads, d, value_dim=v.shape[-1], dtype=dtype, device=k.device,
                tied=tied, group=self.ring, **self.sizes,
            )  # fmt: skip
        if b != self.keys.sequences:
            self._fail(
                f"it holds {self.keys.sequences} sequences, and the model brings {b}; with beams "
                "give `prefill` each prompt as often as there are beams"
            )
        if starts is not None and starts != self._starts and (self._starts or any(starts)):
            self.keys.hide_before(starts)
            self._starts = starts
        return self.keys

    def _check_places(self, k: Tensor, starts: list[int] | None, positions: Tensor | None) -> None:
        """Raise ValueError if new tokens' positions don't continue the cached sequence."""
        if positions is None or positions.ndim != 2:
            return
        b, n = k.shape[:2]
        last = [self.read + n - 1 - start for start in starts or [0] * b]
        if all(i in (end, 0) for i, end in zip(positions[:, -1].expand(b).tolist(), last)):
            return  # padding has position 0
        raise ValueError(
            f"it has {self.read} tokens, and new ones end at positions "
            f"{positions[:, -1].tolist()}, not {last}; assisted decoding begins with an empty cache"
        )

    # ---- prefill

    @torch.no_grad()
    @typed(_report_prefill)
    def prefill(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        chunk_size: int | None = None,
    ) -> None:
        """Compute a prompt except its last token; each rank computes a part of each chunk.

        `generate` with the same ids and mask continues from there. It works without a prefill too,
        but each rank then computes the whole prompt, except for attention.

        Args:
            input_ids: `[b, n]`, the same on all ranks. Tokens already in the cache are skipped.
            attention_mask: `[b, n]`, as for `generate`: 0 where a prompt is padded on its left.
            chunk_size: tokens of a forward pass, over all ranks; None is all. With recurrent layers
                a last chunk of one token that is padding is left to `generate`.

        Raises:
            ValueError: an argument is invalid or differs between ranks; on all ranks.
        """
        begin, length = self.read, input_ids.shape[-1] - 1
        check = partial(self._check_prompt, model, input_ids, attention_mask, chunk_size)
        same = {"values of input_ids": digest(input_ids), "chunk_size": chunk_size}
        same["values of attention_mask"] = (
            None if attention_mask is None else digest(attention_mask)
        )
        agree(self.ring, _PREFILL, same, check=check)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        places = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else None
        given = {name or "past_key_values": self, "use_cache": True}
        size = chunk_size or max(1, length)
        chunks = range(begin, length, size)
        for at in counted(chunks, "prompt", length - begin, "tokens", lambda _: size):
            end = min(at + size, length)
            if self._states and end - at == 1 and not bool(mask[:, at].all()):
                break  # transformers drops the mask of one token: `generate` reads it with the next
            mine = self._mine(end - at, input_ids.device)
            if attention_mask is not None:
                given["attention_mask"] = attention_mask[:, :end]
            part = dict(input_ids=input_ids[:, at + mine], position_ids=places[:, at + mine])
            spread = self._chunk if self._states else None
            chunk = chunk_of(self.ring, _LAYOUT, spread, mask[:, at + mine]) if spread else None
            try:
                with nullcontext() if chunk is None else spread_chunk(chunk):
                    getattr(model, "base_model", model)(**part, **given)  # without logits
            finally:
                self._chunk = None
            if chunk is not None:
                chunk.check_layers(len(self._states))

    def _mine(self, n: int, device: torch.device) -> Tensor:
        """Return this rank's places in a chunk of n tokens; all, if some rank would get none.

        transformers' layers with states take one token for a step of decoding.
        """
        segments = all_segments(_LAYOUT, self.ring.size, n)
        if min(map(count, segments)) < (2 if self._states else 1):
            return torch.arange(n, device=device)
        self._chunk = n
        return segment_positions(segments[self.ring.rank], device)

    def _check_prompt(
        self, model: nn.Module, ids: Tensor, mask: Tensor | None, chunk_size: int | None
    ) -> None:
        if ids.ndim != 2 or ids.is_floating_point():
            raise ValueError(
                f"input_ids must be integers [batch, tokens], got {ids.dtype} {[*ids.shape]}"
            )
        if ids.shape[1] <= self.read:
            raise ValueError(
                f"the cache has {self.read} tokens already; input_ids must be the whole "
                f"prompt, got {ids.shape[1]} tokens"
            )
        if mask is not None and mask.shape != ids.shape:
            raise ValueError(
                f"attention_mask must be {[*ids.shape]} as input_ids are, got {[*mask.shape]}"
            )
        check_least(1, chunk_size=chunk_size)
        if self._states and chunk_size == 1 and mask is not None and not bool(mask.all()):
            raise ValueError(
                "chunk_size must be at least 2 where prompts are padded and layers have states: "
                "transformers drops the mask of one token"
            )
        check_layers(self.config, ids.shape[1], len(self._states))
        if not self._states:
            return
        layers = recurrent_layers(dict(model.named_modules()))
        if len(layers) != len(self._states):
            raise ValueError(
                "the model has layers with states that can't be spread; generate without prefill, "
                "so that each rank computes them whole"
            )
        length = ids.shape[1] - 1
        begins = range(self.read, length, chunk_size or max(1, length))
        parts = [min(begins.step, length - at) for at in begins if at]
        check_next_parts(layers, max(parts, default=0))

    def new_length(self, layer: int, q_length: int) -> int:
        """Return the number of a layer's keys after `q_length` more tokens of this rank."""
        return self.length(layer) + (q_length if self._chunk is None else self._chunk)

    def _check_model(self) -> None:
        check_least(1, **self.sizes)
        check_layers(self.config, 0, len(self._states))
        self._check_name()
        if not self._places:
            raise ValueError("the model has no attention, and nothing but keys is spread")

    def _check_name(self) -> None:
        name = self.config._attn_implementation
        if name in names:
            return
        raise ValueError(
            f'the model has attn_implementation="{name}", which would see new tokens only; call '
            'register(), and give it attn_implementation="ring"'
        )

    def _ensure(self, check: Check, note: str = "{}") -> None:
        """Raise a check's error, put into `note`; nothing is sent, as all ranks check alike."""
        if (error := error_of(check)) is not None:
            self._fail(note.format(error))

    def _fail(self, problem: str) -> NoReturn:
        self._new.clear()
        raise ValueError(f"{_CALLER}: {problem}")


class CachedMask(NamedTuple):
    """The mask passed to attention: its cache, the visible tokens, each sequence's start."""

    cache: RingHFCache
    visible: Visible
    starts: list[int] | None

    def attend(
        self,
        layer: nn.Module,
        qkv: tuple[Tensor, Tensor, Tensor],
        sinks: Tensor | None,
        scores: dict[str, Any],
        positions: Tensor | None,
        given: Mapping[str, Any],
    ) -> Tensor:
        """Return attention of new tokens to the cache, `[b, n, h, d]`.

        Args:
            given: the other options of the layer's call.
        """
        if torch.is_grad_enabled() and any(t.requires_grad for t in qkv):
            self.cache._fail("there are no gradients with a cache: use torch.no_grad()")
        if scores.pop("dropout"):
            self.cache._fail("there is no dropout with a cache: model.eval()")
        self.cache._ensure(partial(check_call, self.visible, given))
        options = {**scores, "window": self.visible.window, "sinks": sinks}
        number: Any = layer.layer_idx
        latents, dtype = self.cache._latents(layer, qkv), qkv[0].dtype
        if latents is not None:
            qkv = absorb(layer, qkv[0], latents)
        tied = latents is not None
        out = self.cache.attend(number, qkv, (self.starts, positions), options, tied).to(dtype)
        return out if latents is None else expand(layer, out)


def _other_keys(layer: int, given: Pair | None) -> str:
    """Return the error text for attention to other keys than the layer gave to the cache."""
    why = "it has given it none, as layers that share the keys of others"
    if given is not None:
        why = f"it has given it {[*given[0].shape]}, and makes other keys of them"
    return (
        f"layer {layer} attends to keys that it has not given to the cache: {why}; this cache "
        "attends to the keys that it holds, so the model needs transformers' own, on each rank"
    )


def _out(found: Any) -> Tensor:
    assert isinstance(found, Tensor)  # lse was not asked for
    return found
