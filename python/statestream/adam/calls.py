"""What a step asks of one parameter, and the kernel calls that it becomes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from statestream import kernels
from statestream.kernels import AdamOptions, Formats
from statestream.kernels.rows import add_rows
from statestream.state.stored import Stored
from statestream.tensors.global_index import Run

__all__ = ["Call", "Job"]


@dataclass(kw_only=True)
class Job:
    """What a step asks of one parameter, checked. Tensors are local."""

    name: str
    param: Tensor
    local: Tensor
    target: Tensor
    """What a kernel updates: `local`, or the FP32 master of a quantised parameter."""
    grad: Tensor
    states: dict[str, Stored]
    counter: Tensor
    formats: Formats
    stochastic: int
    ordinal: int
    """The parameter's number over all groups."""
    runs: tuple[Run, ...] = ()

    @property
    def needs_extras(self) -> bool:
        return bool(self.stochastic) or self.formats.has_scales


@dataclass
class Call:
    """One kernel call: rows on one device with the same formats, and `extras` where they need some."""

    device: torch.device
    formats: Formats
    rows: array = field(default_factory=lambda: array("q"))
    extras: array | None = None
    stochastic: int = 0
    counters: list[Tensor] = field(default_factory=list)
    """Counters of parameters that are several rows each: advanced before the call, which then advances none."""
    params: list[Tensor] = field(default_factory=list)
    locals: list[Tensor] = field(default_factory=list)
    """The local tensors of `params`."""
    keep: list[Any] = field(default_factory=list)
    """What rows point into, alive until the kernel has run: gradients copied into the parameter's layout, say."""
    quantized: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of `params` those in whose place a kernel updates their FP32 master, each with it."""

    def add(self, job: Job, row: tuple[int, ...], scales: Sequence[int], first: int = 0) -> None:
        """A row of the job's elements from `first` on, and the addresses of their first scales. An empty row is one of
        tensors without data."""
        if not row:
            return
        if not job.needs_extras:
            self.rows.extend(row)
            return
        if self.extras is None:
            self.extras = array("q")
        add_rows(
            self.rows,
            self.extras,
            row,
            job.formats,
            ordinal=job.ordinal,
            first=first,
            runs=job.runs,
            scales=tuple(scales),
        )

    def run(self, options: AdamOptions, *, seed: int, **how: Any) -> None:
        """Queues the kernel; `how` are further arguments of kernels.adam."""
        kernels.adam(
            self.device,
            self.rows,
            self.formats,
            options,
            extras=self.extras,
            seed=seed,
            stochastic=self.stochastic,
            **how,
        )
