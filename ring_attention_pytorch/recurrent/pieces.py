"""The maps of pieces: composed to the maps of runs, and followed to the states within runs."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ring_attention_pytorch.recurrent.cuts import Cuts
from ring_attention_pytorch.recurrent.levels import followed


class Pieces(NamedTuple):
    """The maps of pieces.

    Attributes:
        cuts: which pieces these are.
        maps: `[maps, h, d_k, d_v + d_k]`, U beside M.
        u: the U among them, with a gradient or without.
    """

    cuts: Cuts
    maps: Tensor
    u: Tensor

    @classmethod
    def of(cls, maps: Tensor, d_v: int, cuts: Cuts) -> "Pieces":
        """Take maps of pieces, for values of this size."""
        return cls(cuts, maps, maps[..., :d_v])

    @property
    def m(self) -> Tensor:
        """The M among the maps."""
        return self.maps[..., self.u.shape[-1] :]

    def compose(self, runs: Tensor) -> None:
        """Store the maps of the runs that are sent; if no run is cut, they are there."""
        if not self.cuts.whole:
            first = self.maps.index_select(0, self.cuts.first)
            u = pad(self.u, (0, self.m.shape[-1]))  # it is for the first columns of a map
            through = followed(self.m, u, first, self.cuts.rest)
            torch.index_select(through, 0, self.cuts.composed, out=runs)

    def states(self, before: Tensor) -> Tensor:
        """Return the states before pieces, from those before runs."""
        return before if self.cuts.whole else followed(self.m, self.u, before, self.cuts.within)

    def back(self, before: Tensor, own: Tensor, du: Tensor) -> Tensor:
        """Return the gradients of U, or of the states after pieces: they are the same.

        Args:
            before: the states before pieces, as `states` returned them.
            own: the gradients of these, of outputs of the pieces alone.
            du: the gradients of U of the runs that are sent.
        """
        if self.cuts.whole:
            return du
        last = self.cuts.last
        through = torch.matmul(self.m.index_select(0, last).mT, du)
        own = own.index_add(0, self.cuts.ends, through)
        (of_others,) = torch.autograd.grad(before, self.u, own, retain_graph=True)
        return of_others.index_copy(0, last, du)
