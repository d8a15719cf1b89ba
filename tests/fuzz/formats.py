"""How the model holds numbers: patterns in a tensor's memory order, with scales where the format has some."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from native import payload_judge as payloads
from native import storage_judge as storage
from torch import Tensor

__all__ = ["BF16", "FP8", "FP16", "FP32", "INT16", "SCALED", "Held", "held", "memory_order", "patterns_of", "weight"]

FP32, BF16, FP16, FP8, INT16 = torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int16
SCALED = {FP16: payloads.FP16, FP8: payloads.FP8}
_UNSIGNED = {FP32: np.uint32, BF16: np.uint16, FP16: np.uint16, INT16: np.uint16, FP8: np.uint8}
_SAME_SIZE = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def memory_order(tensor: Tensor) -> np.ndarray:
    """The row-major index of each element of a dense tensor, in the order of its memory."""
    rising = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.shape[d]), reverse=True)
    return np.arange(tensor.numel()).reshape(tensor.shape).transpose(rising).reshape(-1)


def patterns_of(tensor: Tensor) -> np.ndarray:
    """Bit patterns in row-major order, as unsigned integers."""
    rows = tensor.detach().contiguous().reshape(-1).view(_SAME_SIZE[tensor.element_size()])
    return rows.numpy().view(_UNSIGNED[tensor.dtype]).copy()


def floats(dtype: torch.dtype, patterns: np.ndarray) -> np.ndarray:
    """float32 of the patterns of a format without scales."""
    if dtype is FP16:
        return patterns.view(np.float16).astype(np.float32)
    return (patterns.astype(np.uint32) << (16 if dtype is BF16 else 0)).view(np.float32)


@dataclass
class Held:
    """A state: `patterns` in memory order; `scales` one for 256 of them."""

    dtype: torch.dtype
    patterns: np.ndarray
    scales: np.ndarray | None = None
    root: bool = False

    def values(self) -> np.ndarray:
        """float32, in memory order."""
        if self.scales is None:
            return floats(self.dtype, self.patterns)
        return payloads.loaded_tensor(SCALED[self.dtype], self.patterns, self.scales, root=self.root)


def held(dtype: torch.dtype, values: np.ndarray, *, root: bool = False, random: np.ndarray | None = None) -> Held:
    """float32 values, in memory order, rounded to a state's format: to nearest, or by 16 random bits an element."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype in SCALED:
        patterns, scales = payloads.stored_tensor(SCALED[dtype], values, root=root, random=random)
        return Held(dtype, patterns.astype(_UNSIGNED[dtype]), scales, root)
    if dtype is FP32:
        return Held(dtype, storage.store_float32(values.view(np.uint32)))
    return Held(dtype, _bfloat16(values, random))


def weight(dtype: torch.dtype, values: np.ndarray, random: np.ndarray | None = None) -> np.ndarray:
    """Patterns of a parameter of these values."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype is FP16:
        halves = values.astype(np.float16).view(np.uint16)
        return np.where(np.isnan(values), np.uint16(payloads.QUIET_NAN[payloads.FP16]), halves).astype(np.uint16)
    if dtype is BF16:
        return _bfloat16(values, random)
    return storage.store_float32(values.view(np.uint32))


def _bfloat16(values: np.ndarray, random: np.ndarray | None) -> np.ndarray:
    bits = values.view(np.uint32)
    return storage.round_to_bfloat16(bits) if random is None else storage.round_to_bfloat16_randomly(bits, random)


def joined(weights: np.ndarray, low: np.ndarray) -> np.ndarray:
    """float32 masters of BF16 weights and remainders; where no master has that pair, the weight alone."""
    magnitude, rounded_up = weights & 0x7FFF, low >= 0x8000
    no_such = np.where(rounded_up, magnitude == 0, magnitude == storage.INFINITY_16)
    alone = weights.astype(np.uint32) << 16
    return np.where(no_such, alone, storage.join(weights, low)).astype(np.uint32).view(np.float32)


def split(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """BF16 patterns and remainders of float32 masters."""
    return storage.split(np.ascontiguousarray(values, np.float32).view(np.uint32))
