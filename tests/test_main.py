"""`python -m ring_attention_pytorch` is the doctor's list of commands."""

import runpy
import sys

import pytest


def test_it_lists_its_commands_and_ends_well(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ring_attention_pytorch", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("ring_attention_pytorch", run_name="__main__")
    assert not ended.value.code
    assert "doctor" in capsys.readouterr().out


def test_a_command_that_is_none_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ring_attention_pytorch", "no-such-command"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("ring_attention_pytorch", run_name="__main__")
    assert ended.value.code
    capsys.readouterr()
