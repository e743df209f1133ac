"""Routed attention of images, whole or as tokens."""

from tests.support.reference import relative_error
from tests.support.routing_cases import DIM, Case, call, image_size


def test_images_whole_or_as_tokens_and_channels_first() -> None:
    height, width = image_size(21)
    case = Case("image", 21, masked=False)
    module, x = case.make(), case.data()["x"]
    want = call(module, case, case.data()).view(2, height, width, DIM)
    assert relative_error(module(x.view(2, height, width, DIM)), want) < 1e-15
    module.channel_first = True
    got = module(x.view(2, height, width, DIM).permute(0, 3, 1, 2))
    assert relative_error(got.permute(0, 2, 3, 1), want) < 1e-15
