"""Cross attention whose shards have any lengths."""

from tests.support.cases import Attention

CROSS = [
    ((4, 4, 4), (9, 9, 9)),
    ((9, 9, 9), (4, 4, 4)),
    ((5, 5, 5), (5, 5, 5)),
    ((1, 7, 3), (6, 2, 11)),
    ((0, 5, 4), (3, 0, 8)),
    ((6, 0, 0), (0, 0, 5)),
    ((3, 3, 3), (0, 0, 0)),
]


def cross(queries: tuple[int, ...], keys: tuple[int, ...], **options) -> Attention:
    return Attention(queries=queries, keys=keys, cross=True, **options)
