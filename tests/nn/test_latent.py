"""`RingLatentAttention` over rings of threads, against one process; and its decoding."""

import pytest
import torch

from ring_attention_pytorch import RingLatentAttention
from ring_attention_pytorch.geometry.layouts import positions
from ring_attention_pytorch.ranks.ring import Ring
from tests.support import threads
from tests.support.reference import relative_error

SIZES = dict(heads=4, rank=6, d_nope=4, d_rope=2, d_v=3)
N = 17


def made(query_rank: int | None = 5) -> tuple[RingLatentAttention, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer = RingLatentAttention(8, query_rank=query_rank, **SIZES).double()
    return layer, torch.randn(2, N, 8).double(), torch.randn(2, N, 8).double()


def alone(layer, x, dout, **options) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = layer(x, plan=layer.make_plan(x, causal=True, **options))
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], dout)]


def by_hand(layer, x) -> torch.Tensor:
    """The layer without this package's attention, rotation and positions."""
    h = layer.norm(x)
    q = layer.to_q(h).view(2, N, 4, 6)
    latent, rotated = layer.to_latent(h).split((6, 2), -1)
    both = torch.einsum("b n r, h d r -> b n h d", layer.latent_norm(latent), layer.up)
    angle = torch.arange(N).double()[:, None]  # d_rope of 2: one frequency, 1

    def turned(t):
        a, b = t[..., :1], t[..., 1:]
        cos, sin = (f(angle).view(N, *(1,) * (t.ndim - 2)) for f in (torch.cos, torch.sin))
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    rotated = turned(rotated)[:, :, None].expand(-1, -1, 4, -1)
    k, q = torch.cat((both[..., :4], rotated), -1), torch.cat((q[..., :4], turned(q[..., 4:])), -1)
    scores = torch.einsum("b i h d, b j h d -> b h i j", q, k) * 6**-0.5
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
    p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return layer.to_out(torch.einsum("b h i j, b j h d -> b i h d", p, both[..., 4:]).flatten(2))


def test_it_is_multi_head_latent_attention():
    layer, x, dout = made()
    want = by_hand(layer, x)
    grads = torch.autograd.grad(want, [*layer.parameters()], dout)
    out, _, *found = alone(layer, x, dout)
    assert relative_error(out, want.detach()) < 1e-6  # angles are float32
    assert max(map(relative_error, found, grads)) < 1e-6


def of_rank(ring, given, options) -> tuple[torch.Tensor, list[torch.Tensor]]:
    layer, x, dout = given
    at = positions("zigzag", rank=ring.rank, ring_size=ring.size, length=N)
    return at, alone(layer, x[:, at], dout[:, at], group=ring, layout="zigzag", **options)


@pytest.mark.parametrize("options", [{}, dict(cu_seqlens=[0, 5, N]), dict(window=4)])
def test_ranks_compute_what_one_process_does(options):
    given = made(None)
    out, dx, *want = alone(*given, **options)
    found, _ = threads.run(3, lambda ring: of_rank(ring, given, options))
    for at, (mine, of_x, *_) in found:
        assert relative_error(mine, out[:, at]) < 1e-10
        assert relative_error(of_x, dx[:, at]) < 1e-10
    for number, grad in enumerate(want):
        total = sum(results[2 + number] for _, results in found)
        assert relative_error(total, grad) < 1e-10


def decoded(ring, layer, x) -> torch.Tensor:
    cache = layer.make_cache(2, page=2, group=ring)
    parts = [layer.decode(x[:, :4], cache)]
    for token in range(4, N):
        parts.append(layer.decode(x[:, token : token + 1], cache))
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("size", [1, 2])
def test_decoding_equals_the_whole_sequence(size):
    layer, x, dout = made()
    want, *_ = alone(layer, x, dout)
    for found in threads.run(size, lambda ring: decoded(ring, layer, x))[0]:
        assert relative_error(found, want) < 1e-10


def test_layers_of_one_cache_are_decoded_each_at_its_own_place():
    """A layer may be ahead of another one: its tokens are rotated by its own length."""
    layer, x, dout = made()
    want, *_ = alone(layer, x, dout)
    cache = layer.make_cache(2, layers=2)
    for first, last in ((0, 5), (5, 9)):
        for number in (0, 1):
            found = layer.decode(x[:, first:last], cache, layer=number)
            assert relative_error(found, want[:, first:last]) < 1e-10


@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_tokens_are_decoded_under_autocast_and_in_a_cache_of_another_dtype(cast, kept):
    layer, x, _ = made()
    want = layer(x, plan=layer.make_plan(x, causal=True))
    layer, x = layer.float(), x.float()
    with torch.autocast("cpu", cast, enabled=cast is not None):
        cache = layer.make_cache(2, dtype=kept)
        found = torch.cat([layer.decode(some, cache) for some in x.split(6, dim=1)], 1)
    assert found.dtype == (cast or torch.float32)
    exact = cast is None and kept == torch.float32
    assert relative_error(found, want) < (1e-6 if exact else 1.5e-2)


def test_tokens_of_another_width_are_refused():
    layer, x, _ = made()
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 8\]"):
        layer(x[..., :7], plan=layer.make_plan(x))
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 8\]"):
        layer.decode(x[0], layer.make_cache(2))


def test_tokens_of_another_dtype_are_refused():
    layer, x, _ = made()
    layer.float()
    for call in (
        lambda: layer.make_plan(x),
        lambda: layer(x, plan=layer.make_plan(x.float())),
        lambda: layer.decode(x, layer.make_cache(2)),
    ):
        with pytest.raises(ValueError, match=r"x must be torch\.float32 as the weights are, got"):
            call()


def test_tokens_that_are_not_the_plans_or_the_caches_are_refused():
    layer, x, _ = made()
    for other in (x[:, 1:], x[1:]):
        with pytest.raises(ValueError, match=rf"x must be \[2, {N}, ...\], as the plan"):
            layer(other, plan=layer.make_plan(x))
    with pytest.raises(ValueError, match=r"x must be \[2, ...\], as the plan or cache is"):
        layer.decode(x[1:], layer.make_cache(2))


@pytest.mark.parametrize("wrong", [lambda x: x[1:], torch.Tensor.double])
def test_ranks_that_wait_for_this_one_hear_of_its_tokens(wrong, monkeypatch):
    layer, x, _ = made()
    layer, x = layer.float(), x.float()
    plan, cache, heard = layer.make_plan(x), layer.make_cache(2), []
    layer.decode(x, cache)  # ranks agree on the first calls; afterwards none does
    monkeypatch.setattr(Ring, "report_failure", lambda _, error: heard.append(str(error)))
    for call in (lambda: layer(wrong(x), plan=plan), lambda: layer.decode(wrong(x), cache)):
        with pytest.raises((ValueError, RuntimeError)) as error:
            call()
        assert str(error.value) in heard.pop()


@pytest.mark.parametrize("change", [lambda x: x[0, 0], lambda x: x[..., 1:], torch.Tensor.int])
def test_all_ranks_hear_of_tokens_that_are_none_when_a_plan_is_made(change):
    layer, x, _ = made()

    def main(ring) -> str:
        with pytest.raises(
            ValueError, match=r"RingLatentAttention: x must be .* \(on rank 1\)"
        ) as told:
            layer.make_plan(change(x) if ring.rank else x, group=ring)
        return str(told.value)

    assert len({*threads.run(2, main)[0]}) == 1


@pytest.mark.parametrize("change", [lambda x: x[1:], lambda x: x[..., 1:], lambda _: "x"])
def test_all_ranks_hear_of_wrong_tokens_in_the_first_decode(change):
    layer, x, _ = made()

    def main(ring) -> str:
        with pytest.raises(ValueError, match=r"x.*\(on rank 1\)") as told:
            layer.decode(change(x) if ring.rank else x, layer.make_cache(2, group=ring))
        return str(told.value)

    assert len({*threads.run(2, main)[0]}) == 1


@pytest.mark.parametrize("change", [lambda x: x[1:], lambda x: x[..., 1:]])
def test_all_ranks_hear_of_wrong_tokens_in_a_later_decode_of_more(change):
    layer, x, _ = made()

    def main(ring) -> str:
        cache = layer.make_cache(2, group=ring)
        for one in (x[:, :1], x[:, 1:2]):
            layer.decode(one, cache)
        with pytest.raises(ValueError, match=r"x.*\(on rank 1\)") as told:
            layer.decode(change(x) if ring.rank else x, cache)
        return str(told.value)

    assert len({*threads.run(2, main)[0]}) == 1
