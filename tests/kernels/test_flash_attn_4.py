"""The adapter of flash-attn 4, over a stand-in."""

import torch
from torch import Tensor

from ring_attention_pytorch.kernels import flash_attn_4
from ring_attention_pytorch.runtime.tape import Tapes
from tests.support.stand_ins import module, wrong_over_stand_in


def test_tiles_parts_and_the_gradient_of_lse(monkeypatch):
    assert not wrong_over_stand_in("flash-attn-4", monkeypatch)


def test_tapes_repeat_what_flash_attn_4_launches_and_not_its_python(monkeypatch):
    """Its compiled functions write where no recorder sees it, and each has a cache."""
    entered: list[str] = []

    def compiled(x: Tensor, y: Tensor, factor: float, nothing: None) -> None:
        with torch._C.DisableTorchFunction():
            y.copy_(x * factor)

    def before(q: Tensor, room: Tensor) -> None:
        before.compile_cache["kind"](q, room, 2.0, None)

    def attend(q: Tensor, *, out: Tensor) -> tuple[Tensor, Tensor, None]:
        entered.append("forward")
        room = torch.empty(q.shape)
        before(q.detach(), room)
        attend.compile_cache["kind"](room, out, 3.0, None)
        return out, room, None

    before.compile_cache, attend.compile_cache = {"kind": compiled}, {"kind": compiled}
    module(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=attend, _before=before)
    caches = before.compile_cache, attend.compile_cache

    def function(_: object, q: Tensor) -> tuple[Tensor, ...]:
        return flash_attn_4._attend(q, out=torch.empty(q.shape))

    tapes = Tapes()
    for _ in range(6):
        q = torch.randn(5)
        out, room = tapes.run(function, None, q)
        assert torch.equal(room, q * 2)
        assert torch.equal(out, q * 2 * 3)
    assert len(entered) == 3
    assert (before.compile_cache, attend.compile_cache) == caches
