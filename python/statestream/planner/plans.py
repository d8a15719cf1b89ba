"""One plan: what was asked, what it takes, and what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from statestream.extras import cli_extra
from statestream.planner.estimate import Estimate, estimate
from statestream.planner.mesh import Share
from statestream.planner.propose import Proposal, propose
from statestream.planner.quantities import BadOption, parse_bytes
from statestream.planner.settings import Settings
from statestream.planner.table import text_of
from statestream.planner.times import Rates, Times, times

__all__ = ["Plan", "make_plan", "room"]

_RESERVE = 0.2
"""Of the GPU's memory, unless told otherwise: activations, gathered layers, the CUDA context, fragmentation."""
_LEAST_GPU = 1 << 20
"""Bytes: no GPU has less, and --gpu-memory 80 is a slip for 80GiB."""


@dataclass(frozen=True)
class Plan:
    """Bytes and seconds of the rank that holds most. `proposals` is empty unless the GPU's memory was given."""

    source: str
    remarks: tuple[str, ...]
    elements: int
    ranks: int
    local_elements: int
    asked: Settings
    estimate: Estimate
    times: Times
    gpu_memory: int | None = None
    reserve: int = 0
    proposals: tuple[Proposal, ...] = ()

    @property
    def proposal(self) -> Proposal | None:
        """The least intrusive way that fits; None where none does, or no GPU was given."""
        return self.proposals[-1] if self.proposals and self.proposals[-1].fits else None

    def as_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts alone: bytes and seconds, as `statestream plan --json` prints them."""
        made: dict[str, Any] = {
            "source": self.source,
            "remarks": list(self.remarks),
            "parameters": self.elements,
            "ranks": self.ranks,
            "parameters_per_rank": self.local_elements,
            "optimizer": self.asked.call(),
            **_numbers(self.estimate),
            "seconds": asdict(self.times),
        }
        if self.gpu_memory is not None:
            made["gpu_memory"], made["reserve"] = self.gpu_memory, self.reserve
            made["tried"] = [
                {"changes": p.changes, "optimizer": p.settings.call(), "fits": p.fits, **_numbers(p.estimate)}
                for p in self.proposals
            ]
            made["proposal"] = None if self.proposal is None else self.proposal.settings.call()
        return made

    def save_png(self, path: str | Path) -> None:
        """Draws the device's and the host's bytes as stacked bars. OSError where `path` cannot be written, ImportError
        where matplotlib is not installed."""
        with cli_extra():
            from statestream.planner.figure import draw  # loads matplotlib

        draw(self, Path(path))

    def __str__(self) -> str:
        return text_of(self)


def room(spelling: str, gpu_memory: str | int | None, reserve: str | int | None) -> tuple[int | None, int | None]:
    """A GPU's bytes and those of them that are kept, None where they are not given. `spelling`: what the caller calls
    the former. BadOption for what cannot be."""
    if gpu_memory is None:
        if reserve is not None:
            raise BadOption("reserve", f"it is part of a GPU's memory; give {spelling} too")
        return None, None
    memory = parse_bytes("gpu_memory", gpu_memory, least=_LEAST_GPU)
    kept = None if reserve is None else parse_bytes("reserve", reserve, least=0)
    if kept is not None and kept > memory:
        raise BadOption("reserve", f"{reserve!r} is more than the GPU's memory, {gpu_memory}")
    return memory, kept


def make_plan(
    shares: Sequence[Share],
    asked: Settings,
    *,
    source: str,
    ranks: int,
    remarks: tuple[str, ...] = (),
    rates: Rates | None = None,
    gpu_memory: int | None = None,
    reserve: int | None = None,
    default_dtype: str = "bf16",
) -> Plan:
    """`reserve` None: a fifth of `gpu_memory`."""
    made = estimate(shares, asked, default_dtype)
    proposals: list[Proposal] = []
    kept = reserve or 0
    if gpu_memory is not None:
        kept = int(_RESERVE * gpu_memory) if reserve is None else reserve
        proposals = propose(shares, asked, default_dtype, gpu_memory, kept)
    return Plan(
        source=source,
        remarks=remarks,
        elements=sum(share.parameter.elements for share in shares),
        ranks=ranks,
        local_elements=sum(share.elements for share in shares),
        asked=asked,
        estimate=made,
        times=times(made, rates or Rates(), ranks),
        gpu_memory=gpu_memory,
        reserve=kept,
        proposals=tuple(proposals),
    )


def _numbers(made: Estimate) -> dict[str, Any]:
    return {
        "device": dict(made.device),
        "host": dict(made.host),
        "step": asdict(made.step),
        "export": asdict(made.export),
        "load": asdict(made.load),
        "device_peak": made.device_peak,
        "host_peak": made.host_peak,
        "on_disk": {"weights": made.weights_on_disk, "state": made.state_on_disk},
    }
