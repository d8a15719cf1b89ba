"""One thing that was looked at, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Finding", "Verdict"]


class Verdict(str, Enum):
    OK = "ok"
    NOTE = "note"
    """Worth knowing, and nothing that has to be put right."""
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """`advice` says what to do; a problem always has some."""

    subject: str
    verdict: Verdict
    text: str
    advice: str = ""

    def __post_init__(self) -> None:
        if self.verdict is Verdict.PROBLEM and not self.advice:
            raise ValueError(f"{self.subject}: a problem without advice helps nobody")
