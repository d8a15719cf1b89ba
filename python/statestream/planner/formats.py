"""How weights, gradients and state are stored, as far as a plan has to know: bytes."""

from __future__ import annotations

from dataclasses import dataclass

from statestream.planner.quantities import BadOption

__all__ = ["FP32", "MASTERS", "MOMENTS", "REMAINDERS", "WEIGHTS", "Format", "format_named"]

SCALE_BLOCK = 256
"""Elements that share one FP32 scale in a scaled format."""


@dataclass(frozen=True)
class Format:
    """`itemsize` and `exported` are bytes an element: as stored, and in a checkpoint of the optimizer."""

    name: str
    itemsize: int
    scaled: bool = False
    exported: int = 4

    def nbytes(self, elements: int) -> int:
        """Bytes of a tensor of so many elements, scales included."""
        scales = 4 * -(-elements // SCALE_BLOCK) if self.scaled else 0
        return elements * self.itemsize + scales

    @property
    def converts(self) -> bool:
        """Whether an export changes the values' form, so that it needs memory to do so."""
        return self.itemsize != self.exported or self.scaled


FP32 = Format("fp32", 4)
_BF16 = Format("bf16", 2)
REMAINDERS = Format("remainders", 2, exported=2)
"""The 16 bits that a BF16 weight lacks; leave as they are."""

WEIGHTS = {f.name: f for f in (FP32, _BF16, Format("fp16", 2), Format("fp8", 1))}
"""Also of gradients. FP8 ones are those of quantised weights."""
MOMENTS = {f.name: f for f in (FP32, _BF16, Format("fp16", 2, scaled=True), Format("fp8", 1, scaled=True))}
MASTERS = {"none": None, "fp32": FP32, "fp16": MOMENTS["fp16"], "remainders": REMAINDERS}

_LONG_NAMES = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "fp8",
    "uint8": "fp8",
}


def format_named(option: str, name: object, known: dict[str, Format | None]) -> Format | None:
    """The format so named: "bf16", "bfloat16", "torch.bfloat16" and torch.bfloat16 are one. BadOption for others."""
    plain = str(name).strip().lower().removeprefix("torch.")
    plain = _LONG_NAMES.get(plain, plain)
    if plain not in known:
        raise BadOption(option, f"{name!r} is not supported; use {', '.join(known)}")
    return known[plain]
