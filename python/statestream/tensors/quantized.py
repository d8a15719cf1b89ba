"""Parameters that hold quantised values, such as Transformer Engine's, and train through an FP32 master.

Such a parameter is a tensor subclass with two methods: ``dequantize(dtype=...)`` gives its values as a plain
tensor, and ``quantize_(values)`` writes values into it. Nothing else is asked of its class, and nothing is
imported for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dequantized", "is_quantized", "rederive_master", "rederived_master", "requantize"]

_PLAIN = (Tensor, torch.nn.Parameter)


def is_quantized(local: Tensor) -> bool:
    """Whether a (local) tensor holds quantised values. Every tensor has a dequantize(); quantize_() tells."""
    return type(local) not in _PLAIN and callable(getattr(local, "quantize_", None))


def dequantized(local: Tensor) -> Tensor:
    """The values as a plain FP32 tensor: a temporary of 4 bytes an element."""
    return local.detach().dequantize(dtype=torch.float32)


def requantize(local: Tensor, master: Tensor) -> None:
    """Writes the FP32 master's values into the quantised tensor."""
    if master.numel():
        local.quantize_(master)


def rederived_master(local: Tensor, master: Tensor) -> Tensor:
    """The FP32 master's values, but the tensor's own where the master does not quantise to them: a new tensor.

    Takes for a moment a second quantised tensor and 8 bytes an element; made only for a parameter that was
    written from outside.
    """
    values = dequantized(local)
    again = torch.empty_like(local.detach())
    if master.numel() and is_quantized(again):
        requantize(again, master)
        values = torch.where(dequantized(again) == values, master, values)
    return values


def rederive_master(local: Tensor, master: Tensor) -> None:
    """Where the FP32 master does not quantise to the tensor's value, that value replaces it."""
    if master.numel():
        master.copy_(rederived_master(local, master))
