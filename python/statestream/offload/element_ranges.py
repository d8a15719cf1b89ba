"""FusedAdam's state in host memory, stepped in ranges of elements.

The kernels take addresses, so a parameter may be cut at any 256 elements: whatever is large is stepped in
pieces, and the budget is a strict bound. Step counters stay on the host.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

import torch
from torch import Tensor

from statestream import kernels
from statestream.arguments import check_param
from statestream.fused_adam import FusedAdam
from statestream.kernels import AdamOptions, Formats
from statestream.moments import MASTER, MOMENTS, STEP, StateFormat
from statestream.offload import stream
from statestream.offload.host_side import HostSide
from statestream.offload.plan import GRAIN_ELEMENTS, Piece, Unit, padded_bytes
from statestream.offload.store import Entry, compact_copy, largest_shard
from statestream.offload.stream import Stage
from statestream.offload.units import Units
from statestream.promised_state import PromisedState
from statestream.sharding import around
from statestream.step_table import Call, StepTable
from statestream.tensors import flat, is_fake, local_of, same_layout

__all__ = ["ElementRanges"]

KINDS = (*MOMENTS, MASTER)


@dataclass(frozen=True)
class HostFormat(StateFormat):
    """StateFormat whose tensors are views of arenas: made, reset and kept in place."""

    keeper: Any = field(default=None, compare=False, repr=False)

    def make(self, param: Tensor) -> dict[str, Any]:
        state = self.keeper.views(param)
        state[STEP].zero_()
        for name in MOMENTS:
            local_of(state[name]).zero_()
        if MASTER in state:
            self.reset_master(param, state)
        return state

    def follow(self, param: Tensor, state: dict[str, Any]) -> None:
        local, dtypes = local_of(param), self.dtypes(param)
        fits = set(state) == {STEP, *dtypes} and all(
            state[name].dtype is dtype and same_layout(local_of(state[name]), local) for name, dtype in dtypes.items()
        )
        if fits and self.keeper.holds(param, state):
            return
        # The parameter changed its shape, or someone put other tensors in the state: trainers do, which move all
        # they find to the device.
        self.keeper.wait()
        # Copies: the new place may be the old one, in another layout.
        old = {name: local_of(state[name]).clone() for name in (STEP, *dtypes) if name in state}
        if not fits:
            self.keeper.rehouse(param)
        state.clear()
        state.update(self.keeper.views(param) if fits else self.make(param))
        for name, value in old.items():
            if name == STEP or value.shape == local.shape:
                local_of(state[name]).copy_(value)

    def reset_master(self, param: Tensor, state: dict[str, Any]) -> None:
        master, local = local_of(state[MASTER]), local_of(param)
        if master.dtype is torch.int16 or is_fake(local):
            master.zero_()  # of a parameter without data the first step makes the master
        else:
            master.copy_(local)


@dataclass
class _Job:
    """One parameter's update in this step, as addresses."""

    name: str
    param: Tensor
    local: Tensor
    grad: Tensor
    counter: Tensor
    formats: Formats
    options: AdamOptions
    refresh: bool
    itemsizes: tuple[int, ...]
    number: int = 0

    @property
    def reads_weight(self) -> bool:
        """Whether the update needs the weight as it was: a master that is there, and right, has it."""
        return self.refresh or self.formats.master in (kernels.NONE, kernels.REMAINDER)

    def span(self, piece: Piece) -> tuple[int, int]:
        """First element and number of elements of a piece."""
        begin = min(piece.first * GRAIN_ELEMENTS, self.local.numel())
        return begin, min(piece.last * GRAIN_ELEMENTS, self.local.numel()) - begin


class ElementRanges(Units):
    """Keeps `inner`'s state in arenas and steps it through `device` in chunks of at most `budget` bytes."""

    splits_parameters = True

    def __init__(
        self,
        inner: FusedAdam,
        device: Any,
        budget: int | None,
        cpu_fraction: float | str = 0.0,
        cpu_threads: int | None = None,
    ):
        super().__init__(inner, device, budget)
        self.host = HostSide(self.store, cpu_fraction, cpu_threads)
        self._counters: dict[int, Tensor] = {}
        self._views: dict[int, dict[str, Any]] = {}
        state, form, table = dict(inner.state), inner.form, inner._table
        settings = {f.name: getattr(inner.form, f.name) for f in fields(StateFormat)}
        self._plain_form = StateFormat(**settings)
        inner.form = HostFormat(**settings, keeper=self)
        inner._table = StepTable(inner.form)
        existing = {p: inner.state.pop(p) for p in state if isinstance(p, Tensor)}
        try:
            self.adopt(existing)
        except BaseException:  # no memory: the optimizer stays as it was
            inner.form, inner._table = form, table
            inner.state.clear()
            inner.state.update(state)
            raise

    # ---- state ----

    def adopt(self, existing: dict[Tensor, dict[str, Any]] | None = None) -> None:
        """Makes host state for every trained parameter that has none, with values from `existing` where given."""
        existing = existing or {}
        with torch.no_grad():
            self.reserve([p for p in self.params() if p.requires_grad or p in existing])
            for param in self.params():
                if param.requires_grad or param in existing:
                    state = self.inner.state[param]
                    for name, value in existing.get(param, {}).items():
                        local_of(state[name]).copy_(local_of(value))

    def reserve(self, params: Sequence[Tensor]) -> None:
        """Host memory for those of `params` that have none yet, in one bank."""
        members = list(self.params())
        self.store.keep(members)
        new = list({id(p): p for p in params if self.store.home(p) is None}.values())
        if not new:
            return
        entries = [self._entry(param) for param in new]
        self.store.add(KINDS, entries)
        with torch.inference_mode(False):
            counters = torch.zeros(len(new))
        for param, counter in zip(new, counters, strict=True):
            self._counters[id(param)] = counter
        self._counters = {id(p): self._counters[id(p)] for p in members if id(p) in self._counters}
        self._views = {id(p): self._views[id(p)] for p in members if id(p) in self._views}
        self.host.prepare(self.device)

    def _entry(self, param: Tensor) -> Entry:
        dtypes = self.inner.form.dtypes(param)
        local = local_of(param)
        numel = max(prod(largest_shard(param)), local.numel())
        itemsizes = [dtypes[kind].itemsize if kind in dtypes else 0 for kind in KINDS]
        unit = Unit(tuple(padded_bytes(numel, b) for b in itemsizes), max(1, -(-numel // GRAIN_ELEMENTS)))
        return Entry(param, unit, tuple(padded_bytes(local.numel(), b) for b in itemsizes))

    def rehouse(self, param: Tensor) -> None:
        """The parameter's data changed: if its state needs other room, it gets it, and with it, in one bank, all
        whose state does (`model.to(dtype)`)."""
        if self._outgrown(param):
            moving = [p for p in self.params() if self._outgrown(p)]
            for p in moving:
                self.store.homes.pop(id(p))
            self.reserve(moving)

    def _outgrown(self, param: Tensor) -> bool:
        home = self.store.home(param)
        return home is not None and home.sizes != self._entry(param).local_sizes

    @torch.inference_mode(False)  # a view of inference mode could not be written outside of it
    @torch.no_grad()
    def views(self, param: Tensor) -> dict[str, Any]:
        """The parameter's state as tensors in host memory, distributed as the parameter is."""
        if self.store.home(param) is None:
            self.wait()
            self.reserve([param])
        home = self.store.home(param)
        local = local_of(param)
        state: dict[str, Any] = {STEP: self._counters[id(param)]}
        for name, dtype in self.inner.form.dtypes(param).items():
            arena = home.bank.arenas[KINDS.index(name)]
            state[name] = around(arena.view(home.index, dtype, local), param)
        self._views[id(param)] = dict(state)
        return state

    def holds(self, param: Tensor, state: dict[str, Any]) -> bool:
        """Whether these are the very tensors that `views` gave."""
        views = self._views.get(id(param), {})
        return views.keys() == state.keys() and all(state[name] is view for name, view in views.items())

    def detached(self) -> FusedAdam:
        twin = super().detached()
        twin.form = self._plain_form
        twin.state = PromisedState(twin._make_state)
        for param, state in self.inner.state.items():
            twin.state[param] = {name: compact_copy(value) for name, value in state.items()}
        return twin

    @property
    def staging_bytes(self) -> int:
        return self.host.staging_bytes

    # ---- the step ----

    def step(self, grad_scale: float) -> None:
        """One update of every parameter that has a gradient, which `grad_scale` divides. Everything is checked
        before anything is changed."""
        jobs = self._jobs()
        if jobs:
            self.host.prepare(self.device)
            layout = self.store.layout
            whole = len(jobs) == len(layout.units)
            flow = _AdamFlow(self, layout, jobs, grad_scale)
            stages = layout.stages(None if whole else jobs.keys())
            host = self.host.share_of(self.device, flow)
            self.took(layout.plan.ring_bytes)
            try:
                self._last_store = stream.run(self.device, layout.plan.ring_bytes, stages, flow, host)
            finally:
                flow.commit()
            if whole and stages:
                self.host.stepped(host)
        for group in self.inner.param_groups:
            group[STEP] += 1

    def _jobs(self) -> dict[int, _Job]:
        """Work by unit of the plan."""
        inner, table = self.inner, self.inner._table
        if inner.form.keeper is not self:
            raise RuntimeError("another CPUOffloadOptimizer has taken over this FusedAdam; step that one")
        grad_name = "decoupled_grad" if inner.use_decoupled_grad else "grad"
        with_grad = [p for p in self.params() if getattr(p, grad_name, None) is not None]
        self.follow(with_grad)
        if any(self.store.home(p) is None for p in with_grad):
            self.wait()
            self.reserve(with_grad)
        found: dict[int, _Job] = {}  # by id first: a state that follows its parameter renumbers the units
        names = self.names()
        for group in inner.param_groups:
            options = inner._options(group)
            for param in group["params"]:
                grad = getattr(param, grad_name, None)
                if grad is not None:
                    found.setdefault(id(param), self._job(table, names[id(param)], param, grad, options))
        for number, job in enumerate(found.values()):
            job.number = number
        return {self.store.home(job.param).unit: job for job in found.values()}

    def _job(self, table: StepTable, name: str, param: Tensor, grad: Tensor, options: AdamOptions) -> _Job:
        local = local_of(param)
        check_param(local, name)
        grad = table.checked_grad(param, local, grad, name)
        state = self.inner.state[param]
        self.inner.form.follow(param, state)
        tensors = [local_of(state[kind]) if kind in state else None for kind in KINDS]
        codes = [kernels.NONE if t is None else kernels.state_format_of(t) for t in tensors]
        formats = Formats(kernels.format_of(local), kernels.format_of(grad), *codes)
        refresh = formats.master == kernels.FLOAT32 and table.was_written(param, local)
        itemsizes = tuple(0 if t is None else t.element_size() for t in tensors)
        return _Job(name, param, local, grad, state[STEP], formats, options, refresh, itemsizes)


class _AdamFlow:
    """stream.Stepper for one step of FusedAdam."""

    def __init__(self, owner: ElementRanges, layout: Any, jobs: dict[int, _Job], grad_scale: float):
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

    def note(self, pieces: list[Piece]) -> None:
        """These were updated. The device's flow and the host's both tell, each on its thread."""
        self.launched.update([(p.unit, p.first) for p in pieces])
        self.started.update([p.unit for p in pieces])

    def lose(self, units: Iterable[int]) -> None:
        """Of these units, those that were begun cannot be finished."""
        lost = {unit for unit in units if unit in self.started} - self.lost
        self.lost |= lost
        self.owner.torn.extend(self.jobs[unit].name for unit in sorted(lost))

    def row(self, job: _Job, n: int, weight: int, grad: int, places: Sequence[int]) -> tuple[int, ...]:
        """A kernel's row, by addresses."""
        return (n, weight, grad, *places, self.counts.data_ptr() + 4 * job.number, 0)

    # ---- on the device ----

    def _rest(self, stage: Stage) -> list[Piece]:
        return self.rest(stage.chunk.pieces)

    def _launch(self, stage: Stage, ring: Tensor, pieces: list[Piece]) -> None:
        for group in self.calls(pieces):
            rows, keep, first = array("q"), [], self.jobs[group[0].unit]
            for piece in group:
                rows.extend(self._row(stage, ring, piece, keep))
            self.device.launch(
                _update, self.device.torch_device, rows, first.formats, first.options, self.grad_scale, keep
            )
            self.note(group)

    def _row(self, stage: Stage, ring: Tensor, piece: Piece, keep: list[Any]) -> tuple[int, ...]:
        """Addresses of a piece, and in `keep` what they point into (until the kernel has been launched)."""
        job = self.jobs[piece.unit]
        if is_fake(job.local):
            return ()
        begin, n = job.span(piece)
        base = ring.data_ptr()
        places = [
            self.layout.place(stage.chunk, piece, kind) if size else None for kind, size in enumerate(job.itemsizes)
        ]
        weight = flat(job.local)[begin : begin + n]
        refresh = None
        if job.refresh and n:
            refresh = (weight, ring[places[2] : places[2] + 4 * n].view(torch.float32))
        keep.append((weight, job.grad, self.counts, refresh))
        grad = job.grad.data_ptr() + begin * job.grad.element_size()
        return self.row(job, n, weight.data_ptr(), grad, [0 if at is None else base + at for at in places])

    def commit(self) -> None:
        """Counts the parameters that were updated, and says that they were written."""
        written: dict[Formats, Call] = {}
        for unit in self.started:
            job = self.jobs[unit]
            if unit not in self.lost:
                job.counter.add_(1.0)
            call = written.setdefault(job.formats, Call(self.device.torch_device, job.formats))
            call.params.append(job.param)
        for call in written.values():
            self.owner.inner._table.updated(call)


def _update(
    device: torch.device, rows: array, formats: Formats, options: AdamOptions, grad_scale: float, keep: list[Any]
) -> None:
    for _, _, _, refresh in keep:
        if refresh is not None:
            kernels.refresh_master(*refresh)
    kernels.adam(device, rows, formats, options, grad_scale=grad_scale, advance=False)
