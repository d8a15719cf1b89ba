"""How weights, gradients and state are stored, as far as a plan has to know: bytes."""

from __future__ import annotations

from collections.abc import Mapping

from statestream.formats import Format, Role, formats_of, plain_name
from statestream.planner.quantities import BadOption

__all__ = ["MASTERS", "MOMENTS", "WEIGHTS", "format_named", "unread"]


def unread(name: str, itemsize: int) -> Format:
    """A format that no kernel reads, and of which only the bytes are known."""
    return Format(name, -1, "", itemsize, frozenset())


WEIGHTS = {**formats_of(Role.PARAMETER), "fp8": unread("fp8", 1)}
"""Also of gradients. FP8 ones are those of quantised weights."""
MOMENTS = formats_of(Role.MOMENT)
MASTERS = {"none": None, **formats_of(Role.MASTER)}


def format_named(option: str, name: object, known: Mapping[str, Format | None]) -> Format | None:
    """The format so named: "bf16", "bfloat16", "torch.bfloat16" and torch.bfloat16 are one. BadOption for others."""
    plain = plain_name(name)
    if plain not in known:
        raise BadOption(option, f"{name!r} is not supported; use {', '.join(known)}")
    return known[plain]
