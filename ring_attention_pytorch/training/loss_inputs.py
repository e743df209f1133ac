"""Inputs of losses: a head's terms, and checks of the values of labels and weights.

The host must wait for a GPU to read a value. A wrong value, such as a label that is no class, is
therefore an error at once only on CPU. On a GPU the device finds it:

    on CPU      the ranks agree: ValueError on all of them, before anything is sent
    on a GPU    the loss is NaN on all ranks, and so are its gradients;
                the next loss, when its ranks agree, raises ValueError on all of them
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attention_pytorch.plan.checks import autocast_dtype
from ring_attention_pytorch.runtime.graph_pool import outside_graph_pool
from ring_attention_pytorch.runtime.rowwise import accumulation_dtype
from ring_attention_pytorch.runtime.streams import capturing
from ring_attention_pytorch.tensor_kinds import check_plain, has_values


class Head(NamedTuple):
    """The terms that turn hidden states x into logits; without a weight x are logits.

    Logits are `softcap * tanh((x @ weight.T + bias) * scale / softcap)`, widened before the scale.

    >>> Head(torch.eye(2), scale=0.5).logits(torch.tensor([[4.0, 6.0]])).tolist()
    [[2.0, 3.0]]
    """

    weight: Tensor | None = None  # [classes, d]
    bias: Tensor | None = None  # [classes]
    scale: float | None = None
    softcap: float | None = None

    def logits(self, x: Tensor) -> Tensor:
        """Compute the logits `[n, classes]` of tokens x `[n, d]`, in the accumulation dtype."""
        if self.weight is None:
            return x.to(accumulation_dtype(x.dtype))
        logits = F.linear(x, self.weight, self.bias)
        logits = logits.to(accumulation_dtype(logits.dtype))
        factor = (1.0 if self.scale is None else self.scale) / (self.softcap or 1.0)
        if factor != 1:
            logits = logits.mul_(factor)  # in place: a chunk of logits is large
        return logits if self.softcap is None else logits.tanh_() * self.softcap

    def classes(self, x: Tensor) -> int:
        """Return the number of classes, for hidden states or logits x."""
        return x.shape[-1] if self.weight is None else len(self.weight)

    def check(self, x: Tensor) -> None:
        """Raise ValueError if the terms don't fit hidden states x `[b, n, d]`."""
        if self.weight is None:
            if any(term is not None for term in self):
                raise ValueError(
                    "bias, scale and softcap make logits of hidden states, together with head=; "
                    "without it x are logits, give them as they shall be"
                )
            return
        _check_alike("head", self.weight, [None, x.shape[2]], x)
        if self.bias is not None:
            _check_alike("bias", self.bias, [len(self.weight)], x)
        self._check_complete()
        most = torch.finfo(accumulation_dtype(x.dtype)).max
        if self.scale is not None and not 0 < abs(self.scale) <= most:
            raise ValueError(f"scale must be finite and not 0, got {self.scale}")
        if self.softcap is not None and not 1 / most < self.softcap <= most:
            raise ValueError(f"softcap must be None, or positive and finite, got {self.softcap}")

    def _check_complete(self) -> None:
        """Raise ValueError if the weight's model has further terms, which were not given."""
        assert self.weight is not None
        for terms_of in _terms_of:
            missing = [
                f"{name}={value}" if isinstance(value, float) else name
                for name, value in terms_of(self.weight).items()
                if name in ("bias", "scale", "softcap") and getattr(self, name) is None
            ]
            if missing:
                raise ValueError(
                    f"head is the weight of a model whose logits also have {', '.join(missing)}; "
                    "give them, as by **head_of(model); scale=1.0 if x is scaled already"
                )


_terms_of: list[Callable[[Tensor], Mapping[str, Any]]] = []


def heads_by(terms_of: Callable[[Tensor], Mapping[str, Any]]) -> None:
    """Set a function that returns the terms by which a model of its own makes logits of a weight.

    An integration knows its package's models.
    """
    _terms_of[:] = [terms_of]


def _check_alike(name: str, t: Tensor, shape: list[int | None], x: Tensor) -> None:
    """Raise ValueError if a tensor has another shape than `shape`, or dtype or device than x."""
    check_plain(name, t)
    fits = t.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, t.shape))
    if not fits or t.device != x.device or autocast_dtype(t) != autocast_dtype(x):
        wanted = ", ".join("classes" if n is None else str(n) for n in shape)
        raise ValueError(
            f"{name} must be [{wanted}] in the hidden states' {x.dtype} on {x.device}, got "
            f"{list(t.shape)} in {t.dtype} on {t.device}; cast them alike, or use autocast"
        )


class Targets(NamedTuple):
    """Labels and weights, with wrong labels replaced.

    Attributes:
        labels: int64 `[b, n]`: a class each, or the label that is ignored.
        real: bool `[b, n]`, True for labels that are not ignored.
        weights: `[b, n]`, 0 where the label is ignored; None if all count alike.
        wrong: bool `[b, n]`, True for a wrong label or weight; None on CPU, where it is an error.
    """

    labels: Tensor
    real: Tensor
    weights: Tensor | None
    wrong: Tensor | None


def targets(
    labels: Tensor, weights: Tensor | None, ignore_index: int, classes: int, dtype: torch.dtype
) -> Targets:
    """Return labels, and weights in `dtype`, without waiting for their values on a GPU."""
    real = labels != ignore_index
    if weights is not None:
        weights = torch.where(real, weights.to(dtype), 0.0)  # times 0, a NaN would stay
    if reads_at_once(labels):
        return Targets(labels, real, weights, None)
    known = labels.clamp(0, max(0, classes - 1))
    wrong_labels = real & (known != labels)
    wrong = wrong_labels if weights is None else wrong_labels | ~_is_weight(weights.detach())
    _flags_of(labels.device).raise_if(wrong_labels, wrong)
    return Targets(torch.where(real, known, ignore_index), real, weights, wrong)


def check_values(labels: Tensor, weights: Tensor | None, ignore_index: int, classes: int) -> None:
    """Raise ValueError for a wrong value; on GPUs for one of an earlier call, once."""
    if not reads_at_once(labels):
        _flags_of(labels.device).check()
        return
    real = labels != ignore_index
    wrong = labels[real & ((labels < 0) | (labels >= classes))]
    if len(wrong):
        raise ValueError(
            f"labels must be 0 to {classes - 1}, or ignore_index={ignore_index} where there is "
            f"nothing to predict, got {int(wrong[0])}"
        )
    if weights is not None:
        wrong = weights.detach()[real]
        wrong = wrong[~_is_weight(wrong)]
        if len(wrong):
            raise ValueError(f"weights must be finite and at least 0, got {wrong[0].item()}")


def check_ignored(made_with: int, ignore_index: int) -> None:
    """Raise ValueError if a loss has another `ignore_index` than the batch that labels are of."""
    if ignore_index != made_with:
        raise ValueError(
            f"the batch's labels have ignore_index={made_with} where there is nothing to predict, "
            f"but the loss ignores {ignore_index}: it would count the others; give shard_batch the "
            "loss's ignore_index"
        )


def check_labels(x: Tensor, labels: Tensor, weights: Tensor | None) -> None:
    """Raise ValueError if x, labels or weights have a wrong shape, dtype or device.

    `check_values` checks their values.
    """
    for name, t in {"x": x, "labels": labels, "weights": weights}.items():
        if t is not None:
            check_plain(name, t)
    if x.ndim != 3 or not x.is_floating_point():
        raise ValueError(
            f"logits or hidden states must be floating [b, n, d], got {x.dtype} {list(x.shape)}"
        )
    if 0 in x.shape[2:]:
        raise ValueError(
            f"logits or hidden states must be [b, n, d] with d above 0, got {list(x.shape)}"
        )
    for name, t in {"labels": labels, "weights": weights}.items():
        if t is None:
            continue
        kind = "int64" if name == "labels" else "real"
        right = t.dtype == torch.int64 if name == "labels" else not t.is_complex()
        if not right or t.shape != x.shape[:2] or t.device != x.device:
            raise ValueError(
                f"{name} must be {kind} {list(x.shape[:2])} on {x.device}, as x is, "
                f"got {t.dtype} {list(t.shape)} on {t.device}"
            )
    for name, t in {"x": x, "labels": labels, "weights": weights}.items():
        if t is not None and not has_values(t):
            raise ValueError(f"{name} must have values, got a {type(t).__name__} on {t.device}")


def reads_at_once(t: Tensor) -> bool:
    """Return whether the host can read a tensor's values without waiting."""
    return t.device.type == "cpu"


def _is_weight(weights: Tensor) -> Tensor:
    return (weights >= 0) & (weights < math.inf)


class _Flags:
    """Flags that a device sets when it finds a wrong value, and the host reads without waiting.

    The host sees a call's flags once the device has finished it.
    """

    _TEXTS: Mapping[int, str] = {
        0: "labels of an earlier loss were neither 0 to classes - 1 nor ignore_index",
        1: "weights of an earlier loss were not finite and at least 0",
    }

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.inference_mode(False):  # otherwise only inference mode could write them
            self._found = outside_graph_pool(
                lambda: torch.zeros(2, dtype=torch.bool, device=device), device
            )
            self._flags = torch.zeros(2, dtype=torch.bool, pin_memory=device.type == "cuda")

    def raise_if(self, wrong_labels: Tensor, wrong: Tensor) -> None:
        """Set a flag on the device if any label is wrong, or, if none is, any weight."""
        labels = wrong_labels.any()
        self._found |= torch.stack((labels, wrong.any() & ~labels))
        if self._device.type != "cuda" or not capturing(self._device):  # a later call copies
            self._flags.copy_(self._found, non_blocking=True)

    def check(self) -> None:
        """Raise ValueError if flags are set, and clear them."""
        up = [at for at, flag in enumerate(self._flags.tolist()) if flag]
        if not up:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._found.zero_()
        self._flags.zero_()
        texts = " and ".join(self._TEXTS[at] for at in up)
        raise ValueError(f"{texts}; so that loss was NaN on all ranks")


_flags: dict[torch.device, _Flags] = {}


def _flags_of(device: torch.device) -> _Flags:
    if device not in _flags:
        _flags[device] = _Flags(device)
    return _flags[device]
