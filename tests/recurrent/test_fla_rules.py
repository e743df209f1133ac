"""Which calls take two passes: where fla's inner functions are the known ones."""

from functools import wraps
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from ring_attention_pytorch.recurrent import fla_rules


def test_other_versions_and_wide_keys_take_one_widened_call(monkeypatch) -> None:
    if find_spec("fla") is None:
        assert not fla_rules.known_parts()
    monkeypatch.setattr(fla_rules, "known_parts", lambda: True)
    assert fla_rules.in_two_passes(128, 128)
    assert not fla_rules.in_two_passes(256, 128)


def test_a_part_is_what_fla_dispatches_from(monkeypatch) -> None:
    def kernels() -> str:
        return "Triton's"

    dispatched = wraps(kernels)(lambda: "another's")
    module = SimpleNamespace(of_chunks=dispatched)
    monkeypatch.setattr(fla_rules, "import_module", {"fla.ops.chunk": module}.__getitem__)
    assert fla_rules.part.__wrapped__("ops.chunk.of_chunks")() == "Triton's"


@pytest.mark.skipif(find_spec("fla") is None, reason="fla-core is not installed")
def test_another_version_has_parts_that_are_not_known(monkeypatch) -> None:
    import fla

    monkeypatch.setattr(fla, "__version__", "0.5.9")
    assert not fla_rules.known_parts.__wrapped__()
