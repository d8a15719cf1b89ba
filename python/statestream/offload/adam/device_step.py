"""One step of FusedAdam over ranges of elements: what the pipeline asks of it, as addresses for the kernels."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statestream import kernels
from statestream.adam.step_table import Call
from statestream.formats import scale_count
from statestream.kernels import AdamOptions, Formats
from statestream.kernels.rows import add_rows
from statestream.offload.adam.factory import STATES
from statestream.streaming.pipeline import Stage
from statestream.streaming.plan import GRAIN_ELEMENTS, Piece
from statestream.tensors.global_index import Run
from statestream.tensors.local import flat, is_fake

__all__ = ["AdamFlow", "Job", "Table"]


@dataclass
class Job:
    """One parameter's update in this step."""

    name: str
    param: Tensor
    local: Tensor
    grad: Tensor
    counter: Tensor
    formats: Formats
    options: AdamOptions
    stochastic: int
    refresh: bool
    kinds: tuple[int, ...]
    """Where its states, and then their scales, are among the bank's arenas; -1 for what it has not."""
    ordinal: int
    grad_kind: int = -1
    """Where its gradient is among the bank's arenas, if it was offloaded."""
    runs: tuple[Run, ...] = ()
    number: int = 0

    @property
    def needs_extras(self) -> bool:
        return bool(self.stochastic) or self.formats.has_scales

    @property
    def reads_weight(self) -> bool:
        """Whether the update needs the weight as it was: a master that is there, and right, has it."""
        return self.refresh or not self.formats.has_master

    @property
    def master_kinds(self) -> tuple[int, int]:
        """The kinds of its master and of the master's scales."""
        return self.kinds[STATES.index("master_param")], self.kinds[-1]

    def span(self, piece: Piece) -> tuple[int, int]:
        """First element and number of elements of a piece."""
        begin = min(piece.first * GRAIN_ELEMENTS, self.local.numel())
        return begin, min(piece.last * GRAIN_ELEMENTS, self.local.numel()) - begin

    def master(self, n: int, values: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Master and scales of a piece of `n` elements, out of the bytes that they begin."""
        dtype = torch.float32 if scales is None else torch.float16
        found = values[: n * dtype.itemsize].view(dtype)
        return found, None if scales is None else scales[: scale_count(n) * 4].view(torch.float32)


class Table:
    """Rows of one kernel call, all of jobs like the first, and what the call is told of them."""

    def __init__(self, first: Job, seed: int):
        self.rows = array("q")
        self.extras = array("q") if first.needs_extras else None
        self.rounding = {"extras": self.extras, "seed": seed, "stochastic": first.stochastic}

    def add(self, job: Job, begin: int, row: tuple[int, ...], scales: Sequence[int]) -> None:
        """A row of the job's elements from `begin` on, and the addresses of their scales."""
        if self.extras is None:
            self.rows.extend(row)
            return
        add_rows(
            self.rows,
            self.extras,
            row,
            job.formats,
            ordinal=job.ordinal,
            first=begin,
            runs=job.runs,
            scales=tuple(scales),
        )


class AdamFlow:
    """stream.Stepper for one step of FusedAdam."""

    def __init__(self, owner: Any, layout: Any, jobs: dict[int, Job], grad_scale: float):
        self.owner, self.device, self.layout, self.jobs, self.grad_scale = owner, owner.device, layout, jobs, grad_scale
        # Counts that include this step. The counters themselves are advanced when the step is done.
        self.counts = torch.stack([job.counter for job in jobs.values()]).add_(1.0)
        self.launched: set[tuple[int, int]] = set()
        self.started: set[int] = set()
        self.lost: set[int] = set()

    def step(self, stage: Stage, ring: Tensor) -> None:
        self._launch(stage, ring, [p for p in stage.chunk.pieces if p.unit in self.jobs])

    def keeps(self, stage: Stage) -> bool:
        return any((p.unit, p.first) in self.launched for p in stage.chunk.pieces)

    def begun(self, stage: Stage) -> bool:
        return bool(self._rest(stage))

    def finish(self, stage: Stage, ring: Tensor) -> None:
        self._launch(stage, ring, self._rest(stage))

    def torn(self, stages: Sequence[Stage], error: BaseException) -> None:
        self.lose(p.unit for stage in stages for p in stage.chunk.pieces)

    # ---- what the host's share needs too ----

    def rest(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Of these the ones that were not updated, of units that were begun."""
        return [p for p in pieces if p.unit in self.started and (p.unit, p.first) not in self.launched]

    def calls(self, pieces: Iterable[Piece]) -> Iterable[list[Piece]]:
        """The pieces, by the kernel calls that update them."""
        calls: dict[tuple[int, Formats], list[Piece]] = {}
        for piece in pieces:
            job = self.jobs[piece.unit]
            calls.setdefault((id(job.options), job.formats), []).append(piece)
        return calls.values()

    def table(self, pieces: list[Piece]) -> Table:
        """For the rows of one call."""
        return Table(self.jobs[pieces[0].unit], self.owner.inner.rounding.seed)

    def note(self, pieces: list[Piece]) -> None:
        """These were updated. The device's flow and the host's both tell, each on its thread."""
        self.launched.update([(p.unit, p.first) for p in pieces])
        self.started.update([p.unit for p in pieces])

    def lose(self, units: Iterable[int]) -> None:
        """Of these units, those that were begun cannot be finished."""
        lost = {unit for unit in units if unit in self.started} - self.lost
        self.lost |= lost
        self.owner.torn.extend(self.jobs[unit].name for unit in sorted(lost))

    def row(self, job: Job, n: int, weight: int, grad: int, places: Sequence[int]) -> tuple[int, ...]:
        """A kernel's row, by addresses."""
        return (n, weight, grad, *places, self.counts.data_ptr() + 4 * job.number, 0)

    # ---- on the device ----

    def _rest(self, stage: Stage) -> list[Piece]:
        return self.rest(stage.chunk.pieces)

    def _launch(self, stage: Stage, ring: Tensor, pieces: list[Piece]) -> None:
        for group in self.calls(pieces):
            table, keep, first = self.table(group), [], self.jobs[group[0].unit]
            for piece in group:
                self._add(table, stage, ring, piece, keep)
            self.device.launch(
                _update, self.device.torch_device, table, first.formats, first.options, self.grad_scale, keep
            )
            self.note(group)

    def _add(self, table: Table, stage: Stage, ring: Tensor, piece: Piece, keep: list[Any]) -> None:
        """A piece's addresses, and in `keep` what they point into (until the kernel has been launched)."""
        job = self.jobs[piece.unit]
        if is_fake(job.local):
            return
        begin, n = job.span(piece)
        offsets = {kind: self.layout.place(stage.chunk, piece, kind) for kind in job.kinds if kind >= 0}
        places = [ring.data_ptr() + offsets[kind] if kind >= 0 else 0 for kind in job.kinds]
        weight = flat(job.local)[begin : begin + n]
        refresh = None
        if job.refresh and n:
            values, scales = (ring[offsets[kind] :] if kind >= 0 else None for kind in job.master_kinds)
            refresh = (weight, *job.master(n, values, scales))
        keep.append((weight, job.grad, self.counts, refresh))
        if job.grad_kind >= 0:
            grad = ring.data_ptr() + self.layout.place(stage.chunk, piece, job.grad_kind)
        else:
            grad = job.grad.data_ptr() + begin * job.grad.element_size()
        row = self.row(job, n, weight.data_ptr(), grad, places[: len(STATES)])
        table.add(job, begin, row, places[len(STATES) :])

    def commit(self) -> None:
        """Counts the parameters that were updated, and says that they were written."""
        written: dict[Formats, Call] = {}
        uncounted: BaseException | None = None
        for unit in self.started:
            job = self.jobs[unit]
            if unit not in self.lost:
                try:
                    job.counter.add_(1.0)
                except BaseException as error:
                    self.owner.torn.append(job.name)
                    uncounted = error
            call = written.setdefault(job.formats, Call(self.device.torch_device, job.formats))
            call.params.append(job.param)
            call.locals.append(job.local)
        for call in written.values():
            self.owner.inner.step_table.updated(call)
        if uncounted is not None:
            try:
                raise uncounted
            finally:
                del uncounted  # its traceback holds this frame, which would hold it


def _update(
    device: torch.device, table: Table, formats: Formats, options: AdamOptions, grad_scale: float, keep: list[Any]
) -> None:
    for _, _, _, refresh in keep:
        if refresh is not None:
            weight, master, scale = refresh
            kernels.refresh_master(weight, master, scale=scale)
    kernels.adam(device, table.rows, formats, options, grad_scale=grad_scale, advance=False, **table.rounding)
