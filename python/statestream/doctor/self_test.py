"""Whether this machine computes the bits that docs/numbers.md promises.

A few steps on numbers made by integer arithmetic, whose result has a known checksum. The checksums are not those of a
run of these kernels: tests/native/test_doctor_checksums.py derives them from the written rule, in exact fractions
rounded one operation at a time.
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statestream.adam.fused_adam import FusedAdam

__all__ = ["CASES", "CHECKSUMS", "COPIES", "ELEMENTS", "OPTIONS", "STEPS", "checksum", "differing", "numbers"]

STEPS = 3
ELEMENTS = 1003
"""Numbers of a tensor: full vectors and a tail."""
COPIES = 70
"""Times that they are repeated in it, so that several threads have a part."""

OPTIONS = {"lr": 2**-9, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True)
class Case:
    """A way of storing, by FusedAdam's arguments, and the dtype of weights and gradients."""

    param: torch.dtype
    arguments: dict[str, Any]


CASES = {
    "FP32": Case(torch.float32, {}),
    "BF16 moments, FP32 masters": Case(
        torch.bfloat16, {"master_weights": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    ),
    "remainders": Case(torch.bfloat16, {"master_weights": True, "store_param_remainders": True}),
}

CHECKSUMS = {
    "FP32": "5fbbb0c9f933aa7830aab74f14e9ac6285101b2a207ce68df4ab1d2bd9676f90",
    "BF16 moments, FP32 masters": "9842b8489345ecd6ff817080adffabe967ddf189228905e20f9b7085ce064fd7",
    "remainders": "1f27bbd34baea37de8bd569d63fa931b3600305c67a8f008df2aee7e520323b8",
}
"""SHA-256 of weight, exp_avg, exp_avg_sq and master after the steps, of each case."""


def numbers(seed: int) -> Tensor:
    """ELEMENTS float32 numbers with 24 significant bits between 2^-16 and 2^4, either sign; the same everywhere."""
    index = torch.arange(ELEMENTS, dtype=torch.int64, device="cpu")
    word = (index * 0x9E3779B1 + seed * 0x85EBCA6B) & 0xFFFFFFFF
    for shift in (15, 12):
        word = ((word ^ (word >> shift)) * 0x2C1B3C6D) & 0xFFFFFFFF
    bits = (word & 0x7FFFFF) + 0x800000
    sign = 1 - 2 * ((word >> 23) & 1)
    exponent = -20 - (word >> 24) % 20
    return torch.ldexp((bits * sign).to(torch.float32), exponent.to(torch.float32))


def differing(device: torch.device) -> list[str]:
    """The cases whose bits on `device` are not the promised ones."""
    return [name for name, case in CASES.items() if checksum(_run(case, device)) != CHECKSUMS[name]]


def checksum(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        held = tensor.detach().cpu().contiguous()
        digest.update(ctypes.string_at(held.data_ptr(), held.nbytes))  # without NumPy, which torch does not bring
    return digest.hexdigest()


def _run(case: Case, device: torch.device) -> list[Tensor]:
    def tensor(seed: int) -> Tensor:
        return numbers(seed).repeat(COPIES).to(case.param).to(device)

    param = torch.nn.Parameter(tensor(0))
    optimizer = FusedAdam([param], **OPTIONS, **case.arguments)
    for step in range(1, STEPS + 1):
        param.grad = tensor(step)
        optimizer.step()
    state = optimizer.state[param]
    return [param, *(state[name] for name in ("exp_avg", "exp_avg_sq", "master_param") if name in state)]
