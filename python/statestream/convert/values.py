"""The values of a converted state, of any part of a tensor: every rule is one element's."""

from __future__ import annotations

import torch
from torch import Tensor

from statestream.convert.rules import How

__all__ = ["dtype_of", "join", "sources", "values_of"]


def sources(how: How, name: str) -> tuple[str | None, bool]:
    """Which state the values are made of, and whether the weight is needed."""
    kept = {How.KEPT: name, How.JOINED: "master_param", How.MASTER: "master_param"}.get(how)
    return kept, how in (How.WEIGHT, How.JOINED, How.ZEROS)


def dtype_of(how: How, kept: torch.dtype | None) -> torch.dtype:
    if how is How.KEPT:
        return kept
    return torch.int16 if how is How.ZEROS else torch.float32


def values_of(how: How, kept: Tensor | None, weight: Tensor | None) -> Tensor:
    """KEPT gives the tensor itself, everything else a new one."""
    if how is How.KEPT:
        return kept
    if how is How.MASTER:
        return kept.to(torch.float32, copy=True)
    if how is How.WEIGHT:
        return weight.to(torch.float32, copy=True)
    if how is How.ZEROS:
        return torch.zeros_like(weight, dtype=torch.int16)
    return join(weight, kept)


def join(weight: Tensor, low: Tensor) -> Tensor:
    """FP32 masters of BF16 weights and their int16 remainders: the inverse of weight = (master + 0x8000) >> 16.

    As an integer a remainder counts from the weight, which was rounded half up. Where no master can have given the
    pair, as after a write to the weight alone (a zero below which something was rounded up, an infinity above which
    there is nothing), the weight counts by itself, as it does in a step.
    """
    high = weight.view(torch.int16)
    magnitude = high & 0x7FFF
    impossible = torch.where(low < 0, magnitude == 0, magnitude == 0x7F80)
    return ((high.int() << 16) + torch.where(impossible, 0, low.int())).view(torch.float32)
