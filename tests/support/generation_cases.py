"""Generation over a ring, against one process that computes all anew for each token."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ring_attention_pytorch import ConditionalRoutedTransformer, RingTransformer, Summaries
from ring_attention_pytorch.nn.generation import Sampling
from ring_attention_pytorch.ranks.ring import Group
from tests.support.reference import relative_error
from tests.support.routing_cases import HEADS, LIGHT, SOFT
from tests.support.transformer_reference import transformer_logits

Generated = tuple[list[list[int]], Tensor | None]  # tokens, and logits `[new, 2, WORDS]`
WORDS = 31
ALLOWED = {torch.float64: 1e-10, torch.float32: 1e-4}
ENDS = [3, 11, 19, 20, 21, 27]


@dataclass(frozen=True)
class Case:
    """A model's options, those of the call, and how much of each prompt is padding."""

    options: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    length: int = 23
    padding: tuple[int, ...] | None = None
    routed: bool = False
    new: int = 12
    dtype: torch.dtype = torch.float64

    def model(self, **ring: Any) -> nn.Module:
        """Make a model, with the same weights on all ranks."""
        if self.routed:
            model = ConditionalRoutedTransformer(
                num_tokens=WORDS, dim=16, depth=2, causal=True, **self.options, **ring
            )
        else:
            model = RingTransformer(
                num_tokens=WORDS, dim=16, depth=2, dim_head=8, heads=4, ff_mult=2, causal=True,
                num_grouped_query_heads=2, **self.options, **ring,
            )  # fmt: skip
        draw = torch.Generator().manual_seed(2)
        for p in model.parameters():
            nn.init.normal_(p, std=0.5, generator=draw)
        return model.to(self.dtype)

    def prompt(self, seed: int = 0) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randint(WORDS, (2, self.length), generator=draw)

    @property
    def mask(self) -> Tensor | None:
        if self.padding is None:
            return None
        return torch.arange(self.length) >= torch.tensor(self.padding).unsqueeze(1)

    def over(self, group: Group = None, seed: int = 0, **call: Any) -> Generated:
        """Return what a ring generates."""
        model, logits = self.model(ring_attn=True, group=group), []
        model.to_logits.register_forward_hook(lambda _, __, out: logits.append(out))
        found = model.generate(self.prompt(seed), self.new, mask=self.mask, **self.call, **call)
        return found.tolist(), torch.stack(logits) if logits else None

    @torch.no_grad()
    def anew(self, seed: int = 0) -> Generated:
        """Return what one process generates without a cache."""
        model, ids, mask = self.model(), self.prompt(seed), self.mask
        how = Sampling(*(self.call.get(name) for name in ("temperature", "top_k", "top_p")))
        how = how._replace(temperature=how.temperature or 0.0)
        draw = torch.Generator().manual_seed(self.call.get("seed", 0))
        ends = torch.tensor(self.call.get("eos", []), dtype=torch.long)
        ended, logits = torch.zeros(2, dtype=torch.bool), []
        for _ in range(self.new):
            logits.append(model(ids, mask)[:, -1])
            token = how.choose(logits[-1], draw)
            if len(ends):
                token[ended] = ends[0]
            ended |= torch.isin(token, ends)
            ids = torch.cat((ids, token.unsqueeze(1)), 1)
            if mask is not None:
                mask = nn.functional.pad(mask, (0, 1), value=True)
            if ended.all():
                break
        return ids.tolist(), torch.stack(logits)

    @torch.no_grad()
    def by_weights(self, tokens: list[list[int]], new: int) -> Tensor:
        """The logits [new, 2, WORDS] of which tokens behind the prompt were chosen, by the oracle.

        It knows the model's weights and options, and nothing else of it.
        """
        options = dict(self.options)
        windows = options.pop("max_lookback_seq_len", None)
        options["windows"] = windows if isinstance(windows, tuple) else (windows,) * 2
        options["theta"] = options.pop("rotary_embed_theta", 10000)
        if (far := options.pop("attn_summaries", None)) is not None:
            options["summaries"] = far.rule._asdict()
        mask = self.mask
        if mask is not None:
            mask = nn.functional.pad(mask, (0, new - 1), value=True)
        read = torch.tensor(tokens)[:, : self.length + new - 1]
        weights = self.model().state_dict()
        logits = transformer_logits(weights, read, heads=4, key_heads=2, mask=mask, **options)
        return logits[:, self.length - 1 :].transpose(0, 1)

    def same(self, got: Generated, want: Generated) -> bool:
        """True if tokens are the same, and logits, if this rank has made them."""
        if got[1] is not None:
            mine, right = got[1].double(), want[1].double()
            if mine.shape != right.shape or relative_error(mine, right) > ALLOWED[self.dtype]:
                return False
        return got[0] == want[0]


SAMPLED = dict(temperature=0.9, top_k=9, top_p=0.8, seed=5)
CASES = [
    Case(call=dict(prefill_chunk_size=7)),
    Case(dict(max_lookback_seq_len=(4, None)), dict(prefill_chunk_size=5)),
    Case(dict(softclamp=1.5, rotary_embed_theta=50), dtype=torch.float32),
    Case(call=dict(prefill_chunk_size=3), padding=(9, 0)),
    Case(dict(max_lookback_seq_len=6), dict(SAMPLED, eos=ENDS), padding=(2, 5)),
    Case(call=SAMPLED, length=1),
    Case(dict(attn_summaries=Summaries(4, 3, 5)), SAMPLED),
    Case(
        dict(attn_summaries=Summaries(3, 2, distance=9, gates=True, pool="attention")),
        padding=(19, 0),
    ),
    Case(dict(attn_summaries=Summaries(2, 2)), length=2),
]
# one layer of each kind, so that a chunk of the prompt is shorter than a convolution
HYBRID = [
    Case(dict(layers="ra"), dict(prefill_chunk_size=7)),
    Case(dict(layers="ma"), dict(SAMPLED, prefill_chunk_size=2), padding=(9, 0)),
    Case(dict(layers="ar"), padding=(0, 20)),
    Case(dict(layers="am"), dict(SAMPLED), length=1),
]
ROUTED_BLOCK = dict(
    num_routed_kv=2, multiply_keys_by_score=True, multiply_queries_by_score=True, **HEADS, **SOFT,
    **{name: LIGHT[name] for name in ("light_dim_head", "light_heads")},
)  # fmt: skip
ROUTED_TOKENS = dict(light_window_size=3, num_heavy_ff_tokens=3)
ROUTED = [
    Case(
        dict(
            num_heavy_attn_tokens_q=2, num_heavy_attn_tokens_kv=3, heavy_window_size=8,
            block_kwargs=ROUTED_BLOCK, **ROUTED_TOKENS,
        ),
        dict(temperature=2.0, seed=5, prefill_chunk_size=6), routed=True, new=20,
    ),
    Case(
        dict(
            num_heavy_attn_tokens_q=0.5, num_heavy_attn_tokens_kv=0.3, heavy_window_size=5,
            block_kwargs=dict(ROUTED_BLOCK, rotary_emb=False), **ROUTED_TOKENS,
        ),
        dict(temperature=2.0, seed=6), routed=True, length=3,
    ),
]  # fmt: skip
