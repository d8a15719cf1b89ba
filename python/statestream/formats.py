"""The table of storage formats: every number that is kept, in a tensor or in a checkpoint, has one of these.

Whatever else has to know of a format asks here: kernels, state, arguments, exports, conversions, the planner.
csrc/number_formats.h has the same table for native code, and tests/native/test_formats.py compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch  # a plan of numbers in a config needs no torch

__all__ = [
    "BF16",
    "FORMATS",
    "FP16",
    "FP32",
    "REMAINDERS",
    "SCALED_FP8",
    "SCALED_FP16",
    "SCALE_BLOCK",
    "Format",
    "Role",
    "dtypes_of",
    "format_of",
    "format_of_state",
    "formats_of",
    "plain_name",
    "scale_count",
]

SCALE_BLOCK = 256
"""Elements of a scaled format that share one FP32 scale."""


class Role(Enum):
    """What a tensor is to an optimizer."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    MOMENT = "moment"
    MASTER = "master"


@dataclass(frozen=True)
class Format:
    """How the numbers of one tensor are stored.

    `name` is what users write, `dtype_name` the torch dtype of the tensor that holds the bits, `code` what kernels call
    it, `itemsize` bytes an element. A scaled format has an FP32 scale for each SCALE_BLOCK elements besides.
    `exported_name` is the torch dtype that a checkpoint has of it.
    """

    name: str
    code: int
    dtype_name: str
    itemsize: int
    roles: frozenset[Role]
    scaled: bool = False
    exported_name: str = "float32"

    @property
    def dtype(self) -> torch.dtype:
        return _dtype(self.dtype_name)

    @property
    def exported(self) -> torch.dtype:
        return _dtype(self.exported_name)

    @property
    def is_short(self) -> bool:
        """Whether storing an FP32 number rounds it, so that it can be rounded by random bits."""
        return self.itemsize < 4 and self.exported_name == "float32"

    @property
    def exported_itemsize(self) -> int:
        return 4 if self.exported_name == "float32" else self.itemsize

    @property
    def converts(self) -> bool:
        """Whether an export changes the bits, so that it needs memory to do so."""
        return self.scaled or self.dtype_name != self.exported_name

    def nbytes(self, elements: int) -> int:
        """Bytes of a tensor of so many elements, scales included."""
        return elements * self.itemsize + (4 * scale_count(elements) if self.scaled else 0)


_WEIGHT = frozenset({Role.PARAMETER, Role.GRADIENT})
_ANY = frozenset(Role)

FP32 = Format("fp32", 1, "float32", 4, _ANY)
BF16 = Format("bf16", 2, "bfloat16", 2, _ANY - {Role.MASTER})
REMAINDERS = Format("remainders", 3, "int16", 2, frozenset({Role.MASTER}), exported_name="int16")
"""The 16 bits of an FP32 master that its BF16 parameter lacks."""
FP16 = Format("fp16", 4, "float16", 2, _WEIGHT)
SCALED_FP16 = Format("fp16", 5, "float16", 2, frozenset({Role.MOMENT, Role.MASTER}), scaled=True)
SCALED_FP8 = Format("fp8", 6, "uint8", 1, frozenset({Role.MOMENT}), scaled=True)
"""E4M3."""

FORMATS = (FP32, BF16, FP16, SCALED_FP16, SCALED_FP8, REMAINDERS)

_OTHER_NAMES = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "uint8": "fp8",  # as Transformer Engine's FusedAdam is given it
    "float8_e4m3fn": "fp8",
}


def formats_of(role: Role) -> dict[str, Format]:
    """The formats that a tensor of that role may have, by name."""
    return {f.name: f for f in FORMATS if role in f.roles}


def dtypes_of(role: Role) -> tuple[torch.dtype, ...]:
    """The dtypes that a tensor of that role may have."""
    return tuple(f.dtype for f in FORMATS if role in f.roles)


@cache
def format_of(role: Role, dtype: torch.dtype) -> Format:
    """The format of a tensor of that role and dtype. KeyError where there is none."""
    return {f.dtype: f for f in FORMATS if role in f.roles}[dtype]


@cache
def format_of_state(dtype: torch.dtype) -> Format:
    """The format of a moment or a master. KeyError for a dtype that neither has."""
    return {f.dtype: f for f in FORMATS if f.roles & {Role.MOMENT, Role.MASTER}}[dtype]


def plain_name(spelling: object) -> str:
    """A format's name as a user, a config file or torch may spell it: "bf16", "torch.bfloat16" and torch.bfloat16 are
    one. What is not known comes back in lower case."""
    plain = str(spelling).strip().lower().removeprefix("torch.")
    return _OTHER_NAMES.get(plain, plain)


def scale_count(numel: int) -> int:
    """Scales of a tensor of that many elements."""
    return -(-numel // SCALE_BLOCK)


def _dtype(name: str) -> torch.dtype:
    import torch

    return getattr(torch, name)
