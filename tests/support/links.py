"""Links of a host among ranks that are threads."""

import socket
from datetime import timedelta

from ring_attention_pytorch.ranks.notes import Links

SIZE = 3


def ring_of_links(patience: float = 10.0) -> list[Links]:
    """The links of each rank."""
    links: list[dict[int, socket.socket]] = [{} for _ in range(SIZE)]
    for a in range(SIZE):
        for b in range(a):
            links[a][b], links[b][a] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for link in [each for of_rank in links for each in of_rank.values()]:
        link.setblocking(False)
    return [Links(rank, of, timedelta(seconds=patience)) for rank, of in enumerate(links)]
