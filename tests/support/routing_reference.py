"""The oracle of routed modules: loops over samples and tokens, which know of no ranks or slots.

It shares nothing with the package but the weights.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.reference import dense_attention


def soft_gates(scores: Tensor, k: float, eps: float) -> tuple[Tensor, Tensor]:
    """Gates of one sample's scores `[n]`, and a, by bisection; gradients by autograd."""
    if k >= len(scores):
        return torch.ones_like(scores), scores.new_tensor(math.inf)
    with torch.no_grad():
        low, high = -scores.max() - eps * 100 * len(scores), -scores.min()
        for _ in range(200):
            middle = (low + high) / 2
            total = ((scores + middle) / eps).clamp(max=0).exp().sum()
            low, high = (middle, high) if total < k else (low, middle)
        below = scores + low < 0
    # with who is below 1 known, a is explicit, and so are its gradients
    a = eps * (math.log(k - (~below).sum().item()) - (scores[below] / eps).logsumexp(0))
    return ((scores + a) / eps).clamp(max=0).exp(), a


def top(scores: Tensor, k: int) -> list[int]:
    """The k largest, ties to the earlier, in ascending order."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i].item(), i))
    return sorted(order[:k])


def how_many(k: float, n: int) -> int:
    return min(k, n) if isinstance(k, int) else math.ceil(k * n - 1e-9)


def scores_of(router: nn.Module, x: Tensor, route: int = 0) -> Tensor:
    return x @ router.routing_token[route]


def chosen(
    router: nn.Module, x: Tensor, real: Tensor, k: float, route: int = 0,
    toward: Tensor | None = None,
) -> dict:  # fmt: skip
    """Choose tokens of one sample x `[n, dim]`: token -> gate; scores along `toward`, if given."""
    at = real.nonzero().flatten()
    scores = scores_of(router, x[at], route) if toward is None else x[at] @ toward
    count = how_many(k, len(at))
    gates, _ = soft_gates(scores, min(count * 9 / 8, len(at)), router.eps)
    if router.straight_through:
        gates = gates + (1 - gates).detach()
    return {int(at[i]): gates[i] for i in top(scores, count)}


def chosen_by_windows(
    router: nn.Module, x: Tensor, real: Tensor, k: float, size: int, route: int = 0
) -> dict:
    found = {}
    for first in range(0, len(x), size):
        here = real.clone()
        here[:first], here[first + size :] = False, False
        found |= chosen(router, x, here, k, route)
    return found


def chosen_causally(router: nn.Module, x: Tensor, real: Tensor, k: float, size: int) -> dict:
    """Token by token; only what came before is looked at."""
    found, scores = {}, scores_of(router, x)
    for i in range(size, len(x)):
        start = i - i % size
        before = [j for j in range(start - size, start) if real[j]]
        taken = sum(start <= j < i for j in found)
        if not real[i] or not before or taken == how_many(k, size):
            continue
        count = how_many(k, len(before))
        _, a = soft_gates(scores[before], min(count * 9 / 8, len(before)), router.eps)
        least = scores[before].sort(descending=True).values[count - 1]
        if count == len(before) or scores[i] >= least:
            gate = ((scores[i] + a) / router.eps).clamp(max=0).exp()
            found[i] = gate + (1 - gate).detach() if router.straight_through else gate
    return found


def turned(t: Tensor, position: int) -> Tensor:
    """Heads t `[h, d]` of a token, rotated by its position; angles and cosines are in float32."""
    d = t.shape[-1]
    angles = position * 10000 ** -(torch.arange(0, d, 2).float() / d)
    cos, sin = angles.cos(), angles.sin()
    a, b = t[:, : d // 2], t[:, d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def heavy(
    attn: nn.Module, x: Tensor, context: Tensor, query: int, sets: list[dict],
    gate: Tensor | float = 1.0,
) -> Tensor:  # fmt: skip
    """Return what one token reads from r sets of (token -> gate), before its own gate."""
    h, d, rotary = attn.heads, attn.dim_head, attn.rotary_embed is not None
    q = attn.to_q(attn.norm(x[query])).view(h, d)
    q = q * gate if attn.multiply_queries else q
    q = turned(q, query) if rotary else q
    out = []
    for head in range(h):
        group = sets[head // (h // len(sets))]
        weights = attn.to_kv.weight.view(2, h, d, -1)[:, head]
        keys, values = [attn.null_kv[0, head]], [attn.null_kv[1, head]]
        for token, gate in group.items():
            k, v = weights @ attn.norm(context[token])
            k = k * gate if attn.multiply_keys else k
            keys.append(turned(k[None], token)[0] if rotary else k)
            values.append(v * gate)
        p = (torch.stack(keys) @ q[head] * d**-0.5).softmax(0)
        out.append(p @ torch.stack(values))
    return attn.to_out(torch.cat(out))


def light(attn: nn.Module, x: Tensor, real: Tensor, causal: bool, window: int) -> Tensor:
    """The local branch of one sample x `[n, dim]`."""
    qkv = F.linear(attn.to_qkv[0](x), attn.to_qkv[1].weight)
    q, k, v = qkv.view(1, len(x), 3, attn.heads, attn.dim_head).unbind(2)
    if attn.rotary_embed is not None:
        q, k = (torch.stack([turned(row, i) for i, row in enumerate(t[0])])[None] for t in (q, k))
    out, _ = dense_attention(q, k, v, causal=causal, window=window, key_mask=real[None])
    return attn.to_out(out[0].flatten(1))


def attention(module: nn.Module, x: Tensor, mask: Tensor, window: int) -> Tensor:
    """`ConditionalRoutedAttention`."""
    out = []
    for tokens, real in zip(x, mask):
        queries = chosen(module.q_router, tokens, real, module.num_heavy_tokens_q)
        sets = [
            chosen(module.kv_router, tokens, real, module.num_heavy_tokens_kv, route)
            for route in range(module.kv_router.routes)
        ]
        rows = [
            queries[i] * heavy(module.heavy_attn, tokens, tokens, i, sets, queries[i])
            if i in queries else module.null_q_token
            for i in range(len(tokens))
        ]  # fmt: skip
        whole = torch.stack(rows)
        if module.light_attn is not None:
            whole = whole + light(module.light_attn, tokens, real, False, window // 2)
        out.append(whole)
    return torch.stack(out)


def image(module: nn.Module, x: Tensor, mask: Tensor, size: tuple[int, int]) -> Tensor:
    """`ConditionalRoutedImageAttention` of tokens row by row; each sees its square."""
    out, (_, width) = [], size
    for tokens, real in zip(x, mask):
        squares: dict[tuple[int, int], list[int]] = {}
        for i in range(len(tokens)):
            place = i // width // module.side, i % width // module.side
            squares.setdefault(place, []).append(i)
        rows: list[Tensor] = [tokens] * len(tokens)
        for inside in squares.values():
            seen = light(module.window_attn, tokens[inside], real[inside], False, len(inside))
            for i, row in zip(inside, seen):
                rows[i] = row
        out.append(torch.stack(rows))
    return attention(module, x, mask, 0) + torch.stack(out)


def block(module: nn.Module, x: Tensor, mask: Tensor, window: int) -> Tensor:
    """`ConditionalRoutedTransformerBlock`."""
    causal = hasattr(module.conditional_attn, "window")
    x = x + (autoregressive if causal else attention)(module.conditional_attn, x, mask, window)
    return x + feedforward(module.conditional_ff, x, mask, window)


def autoregressive(module: nn.Module, x: Tensor, mask: Tensor, window: int) -> Tensor:
    """`ConditionalRoutedAutoregressiveAttention`, likewise."""
    out, size = [], module.window
    for tokens, real in zip(x, mask):
        queries = chosen_causally(module.q_router, tokens, real, module.num_heavy_tokens_q, size)
        sets = [
            chosen_by_windows(
                module.kv_router, tokens, real, module.num_heavy_tokens_kv, size, route
            )
            for route in range(module.kv_router.routes)
        ]
        rows = []
        for i in range(len(tokens)):
            seen = [{j: g for j, g in s.items() if j < i - i % size} for s in sets]
            rows.append(
                queries[i] * heavy(module.heavy_attn, tokens, tokens, i, seen, queries[i])
                if i in queries else module.null_q_token
            )  # fmt: skip
        out.append(torch.stack(rows) + light(module.light_attn, tokens, real, True, window))
    return torch.stack(out)


def feedforward(module: nn.Module, x: Tensor, mask: Tensor, _: int) -> Tensor:
    """`ConditionalRoutedFeedForward`, over the whole or causally by windows."""
    out = []
    for tokens, real in zip(x, mask):
        if module.window is None:
            routed = chosen(module.router, tokens, real, module.num_heavy_tokens)
        else:
            routed = chosen_causally(
                module.router, tokens, real, module.num_heavy_tokens, module.window
            )
        rows = [
            module.light_ff(t) + (routed[i] * module.heavy_ff(t) if i in routed else 0)
            for i, t in enumerate(tokens)
        ]
        out.append(torch.stack(rows))
    return torch.stack(out)


def cross(
    module: nn.Module, x: Tensor, context: Tensor, mask: Tensor, context_mask: Tensor
) -> Tensor:
    """`ConditionalRoutedCrossAttention` whose source says which keys are routed."""
    out, routes = [], module.kv_router.routes
    for tokens, others, real, real_others in zip(x, context, mask, context_mask):
        queries = chosen(module.q_router, tokens, real, module.num_tokens_q)
        mean = tokens[real].sum(0) / max(1, int(real.sum()))
        along = module.to_routing_tokens(mean).view(routes, -1)
        sets = [
            chosen(module.kv_router, others, real_others, module.num_tokens_kv, toward=toward)
            for toward in along
        ]
        rows = [
            queries[i] * heavy(module.heavy_attn, tokens, others, i, sets)
            if i in queries else module.null_q_token
            for i in range(len(tokens))
        ]  # fmt: skip
        out.append(torch.stack(rows))
    return torch.stack(out)


def cosine_gates(
    x: Tensor, toward: Tensor, k: int, scale: float, eps: float
) -> tuple[list[list[list[int]]], Tensor]:
    """The tokens that a router by cosines chooses, and the gates of all, `[b, r, n]`."""
    positions, gates = [], []
    for sample in x:
        positions.append([])
        for along in toward:
            cosines = (sample @ along) / (sample.square().sum(-1).sqrt() * along.norm())
            positions[-1].append(top(scale * cosines, k))
            gates.append(soft_gates(scale * cosines, k * 9 / 8, eps)[0])
    return positions, torch.stack(gates).view(len(x), len(toward), -1)
