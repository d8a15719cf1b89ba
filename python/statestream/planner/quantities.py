"""Numbers as people write them: 80GiB, 8e9, 7.6B, 55GB/s."""

from __future__ import annotations

import math
import re

__all__ = ["MOST", "BadOption", "as_text", "parse_bytes", "parse_count", "parse_rate", "seconds_text"]

_SIZES = {"": 1, "b": 1} | {
    f"{letter}{infix}b": base**power
    for power, letter in enumerate("kmgt", 1)
    for infix, base in (("", 1000), ("i", 1024))
}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_WRITTEN = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)

MOST = 10**18
"""Of anything: more is a slip of the keyboard, and would overflow what tables show."""


class BadOption(ValueError):
    """An option that cannot be. `name` is the argument's name in Python; a command line writes it with hyphens."""

    def __init__(self, name: str, problem: str):
        super().__init__(f"{name}: {problem}")
        self.name, self.problem = name, problem


def parse_bytes(name: str, value: str | int | float, least: int = 1) -> int:
    """A size: a number of bytes, or one with B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB or TiB."""
    return _parsed(name, value, value, _SIZES, "a size", "80GiB, 500MB or a number of bytes", least)


def parse_count(name: str, value: str | int | float) -> int:
    """A count: a number, or one with K, M, B or T for thousands, millions, billions, trillions."""
    return _parsed(name, value, value, _COUNTS, "a count", "8e9, 7.6B or 1500000")


def parse_rate(name: str, value: str | int | float) -> int:
    """Bytes a second: a size, with or without /s."""
    text = value.strip().removesuffix("/s") if isinstance(value, str) else value
    return _parsed(name, value, text, _SIZES, "a bandwidth", "55GB/s or 4TB/s")


def _parsed(
    name: str,
    value: str | int | float,
    text: str | int | float,
    units: dict[str, int],
    what: str,
    example: str,
    least: int = 1,
) -> int:
    """`text` is the part of `value` that is a number and its unit; errors show the whole."""
    match = _WRITTEN.fullmatch(str(text))
    unit = units.get(match[2].lower()) if match else None
    try:
        number = float(match[1]) * unit if match and unit else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadOption(name, f"{value!r} is not {what}; write it as {example}")
    if not least <= number <= MOST:
        raise BadOption(name, f"{value!r} is out of range; it must be from {least} to {MOST:.0e}")
    return round(number)


def as_text(nbytes: float) -> str:
    """Bytes in the largest binary unit of which there is at least one."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(nbytes) >= 0.999995 * 1024**power:
            return f"{nbytes / 1024**power:.2f} {unit}"
    return f"{nbytes:.0f} B"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
