"""Tables that go to a device: what arrives is what was sent."""

import torch

from ring_attention_pytorch.runtime.uploads import uploaded


def test_a_table_on_the_host_is_itself() -> None:
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    assert uploaded(table, torch.device("cpu")) is table
