"""One step of FusedAdam over ranges of elements: what the pipeline asks of it, as addresses for the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statestream import kernels
from statestream.adam.calls import Call, Job
from statestream.formats import scale_count
from statestream.kernels import AdamOptions, Formats
from statestream.state.state_format import MASTER, STATES
from statestream.streaming.pipeline import Stage
from statestream.streaming.plan import GRAIN_ELEMENTS, Piece
from statestream.tensors.local import flat, is_fake

__all__ = ["AdamFlow", "StreamedJob", "refresh_masters"]

Refresh = tuple[Tensor, Tensor, Tensor | None]
"""A weight, and its master and the master's scales, which take on the weight's value where they do not round to it."""


@dataclass(kw_only=True)
class StreamedJob(Job):
    """One parameter's update in this step, and where its state lies in the arenas."""

    options: AdamOptions
    refresh: bool
    """Whether the weight was written since the last step, so that its master has to follow it."""
    kinds: tuple[int, ...]
    """The arenas of its states and then of their scales, as numbers in the bank; -1 for what it has not."""
    grad_kind: int = -1
    """The arena of its gradient, if that was offloaded."""
    number: int = 0

    @property
    def reads_weight(self) -> bool:
        """Whether the update needs the weight as it was: a master that is there, and right, has it."""
        return self.refresh or not self.formats.has_master

    def span(self, piece: Piece) -> tuple[int, int]:
        """First element and number of elements of a piece."""
        begin = min(piece.first * GRAIN_ELEMENTS, self.local.numel())
        return begin, min(piece.last * GRAIN_ELEMENTS, self.local.numel()) - begin


class AdamFlow:
    """A pipeline.Stepper: one step of FusedAdam."""

    def __init__(self, owner: Any, layout: Any, jobs: dict[int, StreamedJob], grad_scale: float):
        self.owner, self.device, self.layout, self.jobs = owner, owner.device, layout, jobs
        self.seed, self.grad_scale = owner.inner.rounding.seed, grad_scale
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

    def call(self, device: torch.device, pieces: list[Piece]) -> Call:
        """The kernel call for pieces of one of `calls`, without rows."""
        first = self.jobs[pieces[0].unit]
        return Call(device, first.formats, stochastic=first.stochastic)

    def add(
        self, call: Call, piece: Piece, weight: Tensor, grad: int, place: Callable[[int], tuple[Tensor, int]]
    ) -> Refresh | None:
        """Adds the piece's row: its weights, the address of its gradient, and by kind of state the memory that it lies
        in and the offset there, in bytes. Returns what brings its master back to the weight before the call, where the
        weight was written since the last step."""
        job = self.jobs[piece.unit]
        begin, n = job.span(piece)
        places = [place(kind) if kind >= 0 else None for kind in job.kinds]
        addresses = [0 if found is None else found[0].data_ptr() + found[1] for found in places]
        counter = self.counts.data_ptr() + self.counts.element_size() * job.number
        row = (n, weight.data_ptr(), grad, *addresses[: len(STATES)], counter, 0)
        call.add(job, row, addresses[len(STATES) :], first=begin)
        if not (job.refresh and n):
            return None
        dtype, (values, scales) = job.states[MASTER].local.dtype, (places[STATES.index(MASTER)], places[-1])
        master = _bytes(values, n * dtype.itemsize).view(dtype)
        return weight, master, None if scales is None else _bytes(scales, scale_count(n) * 4).view(torch.float32)

    def note(self, pieces: list[Piece]) -> None:
        """These were updated. The device's flow and the host's both tell, each on its thread."""
        self.launched.update([(p.unit, p.first) for p in pieces])
        self.started.update([p.unit for p in pieces])

    def lose(self, units: Iterable[int]) -> None:
        """Of these units, those that were begun cannot be finished."""
        lost = {unit for unit in units if unit in self.started} - self.lost
        self.lost |= lost
        self.owner.torn.extend(self.jobs[unit].name for unit in sorted(lost))

    # ---- on the device ----

    def _rest(self, stage: Stage) -> list[Piece]:
        return self.rest(stage.chunk.pieces)

    def _launch(self, stage: Stage, ring: Tensor, pieces: list[Piece]) -> None:
        for group in self.calls(pieces):
            call, refreshes = self.call(self.device.torch_device, group), []
            for piece in group:
                job = self.jobs[piece.unit]
                if is_fake(job.local):
                    continue
                begin, n = job.span(piece)

                def place(kind: int, piece: Piece = piece) -> tuple[Tensor, int]:
                    return ring, self.layout.place(stage.chunk, piece, kind)

                weight = flat(job.local)[begin : begin + n]
                if job.grad_kind >= 0:
                    grad = ring.data_ptr() + place(job.grad_kind)[1]
                else:
                    grad = job.grad.data_ptr() + begin * job.grad.element_size()
                refreshes.append(self.add(call, piece, weight, grad, place))
                call.keep += (weight, job.grad, self.counts)
            options = self.jobs[group[0].unit].options
            self.device.launch(_update, call, options, self.seed, self.grad_scale, refreshes)
            self.note(group)

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
            self.owner.inner.backend.updated(call)
        if uncounted is not None:
            try:
                raise uncounted
            finally:
                del uncounted  # its traceback holds this frame, which would hold it


def _update(call: Call, options: AdamOptions, seed: int, grad_scale: float, refreshes: list[Refresh | None]) -> None:
    refresh_masters(refreshes)
    call.run(options, seed=seed, grad_scale=grad_scale, advance=False)


def refresh_masters(refreshes: Iterable[Refresh | None]) -> None:
    """What AdamFlow.add returned, done."""
    for refresh in refreshes:
        if refresh is not None:
            weight, master, scale = refresh
            kernels.refresh_master(weight, master, scale=scale)


def _bytes(place: tuple[Tensor, int], nbytes: int) -> Tensor:
    memory, at = place
    return memory[at : at + nbytes]
