"""FusedAdam's state in host memory, stepped in ranges of elements.

The kernels take addresses, so a parameter may be cut at any 256 elements: whatever is large is stepped in
pieces, and the budget is a strict bound. Step counters stay on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from statestream.adam.fused_adam import FusedAdam
from statestream.adam.grad_scaling import StepNumbers
from statestream.adam.state_backend import ResidentState, checked_grad
from statestream.formats import scale_count
from statestream.kernels import AdamOptions
from statestream.offload.adam.device_step import AdamFlow, StreamedJob
from statestream.offload.adam.host_share import HostSide
from statestream.offload.adam.streamed_state import StreamedState, scales_of
from statestream.offload.gradients.accumulate import GRAD_BYTES, OffloadedGradients
from statestream.offload.host.arena import GRADS
from statestream.offload.host.store import Entry, Location, compact_copy, largest_shard
from statestream.offload.strategy import Strategy
from statestream.state.lazy_state import LazyState
from statestream.state.state_format import MASTER, STATES, STEP
from statestream.state.stored import SCALED, Stored
from statestream.streaming import pipeline
from statestream.streaming.plan import GRAIN_ELEMENTS, Unit
from statestream.tensors.local import local_of
from statestream.tensors.sharding import as_dtensor_like

__all__ = ["AdamStrategy"]


class AdamStrategy(Strategy):
    """Keeps `inner`'s state in arenas and steps it through `device` in chunks of at most `budget` bytes."""

    splits_parameters = True

    def __init__(
        self,
        inner: FusedAdam,
        device: Any,
        budget: int | None,
        cpu_fraction: float | str = 0.0,
        cpu_threads: int | None = None,
        offload_gradients: bool = False,
    ):
        super().__init__(inner, device, budget)
        self.host = HostSide(self.store, cpu_fraction, cpu_threads, offload_gradients)
        self.gradients = OffloadedGradients(self, cpu_threads) if offload_gradients else None
        if self.gradients is not None:
            self.hooks = self.gradients.hooks
        self.snapshot: bool | None = None
        """Whether the state dict that is being made holds copies."""
        self._counters: dict[int, Tensor] = {}
        self._views: dict[int, dict[str, Any]] = {}
        scales = [scales_of(name) for name in STATES if inner.state_format.dtype_of(name) in SCALED]
        self.kinds = (*STATES, *([GRADS] if offload_gradients else []), *scales)
        state, backend = dict(inner.state), inner.backend
        inner.keep_state_with(StreamedState(inner.state_format, inner.rounding, self))
        existing = {p: inner.state.pop(p) for p in state if isinstance(p, Tensor)}
        try:
            self.adopt({p: backend.all_stored(p, values) for p, values in existing.items()})
        except BaseException:  # no memory: the optimizer stays as it was
            inner.keep_state_with(backend)
            inner.state.clear()
            inner.state.update(state)
            raise

    # ---- state ----

    def state_dict(self, snapshot: bool) -> dict[str, Any]:
        """FusedAdam's own; `snapshot` says whether tensors are copies or live."""
        self.adopt()  # all in one bank, rather than one by one as they are looked at
        self.snapshot = snapshot
        try:
            return self.inner.state_dict()
        finally:
            self.snapshot = None

    def adopt(self, existing: dict[Tensor, dict[str, Any]] | None = None) -> None:
        """Makes host state for every trained parameter that has none, with values from `existing` (StateFactory's
        all_stored) where given."""
        existing, takes = existing or {}, self.inner.backend.takes
        with torch.no_grad():
            wanted = [p for p in self.params() if p in existing or (p.requires_grad and takes(p))]
            self.reserve(wanted)
            for param in wanted:
                state = self.inner.state[param]
                for name, value in existing.get(param, {}).items():
                    if isinstance(value, Stored):
                        self.inner.backend.carry(value, self.inner.backend.stored(param, name, state[name]))
                    elif name == STEP:
                        state[name].copy_(self.inner.backend.step_in({STEP: value}))
                    elif name not in STATES:  # a user's own, which is not streamed
                        state[name] = value
        if self.gradients is not None:
            self.gradients.attend()

    def reserve(self, params: Sequence[Tensor]) -> None:
        """Host memory for those of `params` that have none yet: in one bank, but that masters of two dtypes, as a model
        of bfloat16 and float16 parameters has with remainders, are in two. torch.save refuses views of one memory as
        different types."""
        members = list(self.params())
        self.store.keep(members)
        new = list({id(p): p for p in params if self.store.location(p) is None}.values())
        if not new:
            return
        masters = {id(p): self.inner.state_format.dtypes(p).get(MASTER) for p in new}
        first = next((dtype for dtype in masters.values() if dtype is not None), None)
        for together in (True, False):
            bank = [p for p in new if (masters[id(p)] in (None, first)) is together]
            if bank:
                self.store.add(self.kinds, [self._entry(param) for param in bank])
        with torch.inference_mode(False):
            counters = torch.zeros(len(new), dtype=torch.float32, device="cpu")
        for param, counter in zip(new, counters, strict=True):
            self._counters[id(param)] = counter
        self._counters = {id(p): self._counters[id(p)] for p in members if id(p) in self._counters}
        self._views = {id(p): self._views[id(p)] for p in members if id(p) in self._views}
        self.host.prepare(self.device)

    def _entry(self, param: Tensor) -> Entry:
        grain_bytes, local = self._grain_bytes(param), local_of(param).numel()
        grains = max(1, -(-max(prod(largest_shard(param)), local) // GRAIN_ELEMENTS))
        unit = Unit(tuple(grains * b for b in grain_bytes), grains)
        return Entry(param, unit, self._sizes(param))

    def _grain_bytes(self, param: Tensor) -> list[int]:
        """Bytes of each kind in a grain of the parameter's state."""
        dtypes = self.inner.state_format.dtypes(param)
        grain_bytes = [dtypes[kind].itemsize * GRAIN_ELEMENTS if kind in dtypes else 0 for kind in STATES]
        if self.gradients is not None:
            grain_bytes.append(GRAD_BYTES * GRAIN_ELEMENTS)
        scaled = [name for name in STATES if scales_of(name) in self.kinds]
        return grain_bytes + [torch.float32.itemsize if dtypes.get(name) in SCALED else 0 for name in scaled]

    def _sizes(self, param: Tensor) -> tuple[int, ...]:
        """Bytes of each kind of the local state of the parameter as it is now."""
        grains = -(-local_of(param).numel() // GRAIN_ELEMENTS)
        return tuple(grains * b for b in self._grain_bytes(param))

    def close(self) -> None:
        in_charge, inner = self.in_charge, self.inner
        if self.gradients is not None:
            self.gradients.clear()
        super().close()
        if in_charge:
            inner.keep_state_with(ResidentState(inner.state_format, inner.rounding))

    def drop(self, params: Iterable[Tensor]) -> None:
        for param in params:
            self._counters.pop(id(param), None)
            self._views.pop(id(param), None)
            self.inner.backend.forget(param)
        super().drop(params)

    def take_over_gradients(self) -> None:
        super().take_over_gradients()
        if self.gradients is not None:
            self.gradients.attend()

    @torch.inference_mode(False)  # a view of inference mode could not be written outside of it
    @torch.no_grad()
    def views(self, param: Tensor) -> dict[str, Any]:
        """The parameter's state as tensors in host memory, distributed as the parameter is."""
        location = self.location_of(param)
        local = local_of(param)
        state: dict[str, Any] = {STEP: self._counters[id(param)]}
        scales = {}
        for name, dtype in self.inner.state_format.dtypes(param).items():
            arena = location.bank.arenas[self.kinds.index(name)]
            state[name] = as_dtensor_like(arena.view(location.index, dtype, local), param)
            if dtype in SCALED:
                of_blocks = torch.empty(scale_count(local.numel()), dtype=torch.float32, device="meta")
                arena = location.bank.arenas[self.kinds.index(scales_of(name))]
                scales[name] = arena.view(location.index, torch.float32, of_blocks)
        self.inner.backend.forget(param)
        if scales:
            self.inner.backend.scales[param] = scales
        self._views[id(param)] = dict(state)
        return state

    def location_of(self, param: Tensor) -> Location:
        """Where the parameter's state lies, with room for the parameter as it is now.

        One that has no place gets one. So does one that changed, together with all others that did: a model's new
        dtype leaves one bank, not a bank a parameter. Whoever holds views of the old place keeps its memory alive.
        """
        if not self._fits(param):
            self.wait()
            moving = [p for p in self.params() if self.store.location(p) is not None and not self._fits(p)]
            for p in moving:
                self.store.leave(p)
                self._views.pop(id(p), None)  # they are of the place that it leaves, whatever its form is later
            self.reserve([*moving, param])
        return self.store.location(param)

    def _fits(self, param: Tensor) -> bool:
        location = self.store.location(param)
        return location is not None and location.sizes == self._sizes(param)

    def holds(self, param: Tensor, state: dict[str, Any]) -> bool:
        """Whether these are the very tensors that `views` gave."""
        views = self._views.get(id(param), {})
        return bool(views) and all(state.get(name) is view for name, view in views.items())

    def detached(self) -> FusedAdam:
        twin = super().detached()
        twin.keep_state_with(ResidentState(self.inner.state_format, self.inner.rounding))
        for param, scales in self.inner.backend.scales.items():
            twin.backend.scales[param] = compact_copy(scales)
        twin.__setstate__({"state": LazyState()})
        for param, state in self.inner.state.items():
            twin.state[param] = {name: compact_copy(value) for name, value in state.items()}
        return twin

    @property
    def host_bytes(self) -> int:
        return self.store.nbytes - self.gradient_bytes

    @property
    def gradient_bytes(self) -> int:
        return sum(arena.nbytes for bank in self.store.banks for arena in bank.arenas if arena.kind == GRADS)

    @property
    def staging_bytes(self) -> int:
        return self.host.staging_bytes + (0 if self.gradients is None else self.gradients.staging.nbytes)

    # ---- the step ----

    def update(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        self.inner.update(grad_scale, found_inf)

    def stream(self, numbers: StepNumbers) -> None:
        """One update of every parameter that has a gradient. Everything is checked before anything is changed."""
        jobs = self._jobs(numbers.options)
        if jobs:
            self.host.prepare(self.device, jobs.keys())
            layout = self.store.layout
            whole = len(jobs) == len(layout.units)
            flow = AdamFlow(self, layout, jobs, numbers.grad_scale)
            stages = layout.stages(None if whole else jobs.keys())
            host = self.host.share_of(self.device, flow)
            self.took(layout.plan.ring_bytes)
            try:
                event = pipeline.run(self.device, layout.plan.ring_bytes, stages, flow, host)
                self.inner_hooks.stored(self.device, event)
            finally:
                flow.commit()
            if stages:
                self.host.stepped(host, jobs.keys())
            if self.gradients is not None:
                self.gradients.clear()
        elif self.gradients is None:
            self.check_gradients()
        for group in self.inner.param_groups:
            group[STEP] += 1

    def _jobs(self, options_of_groups: Sequence[AdamOptions]) -> dict[int, StreamedJob]:
        """Work by unit of the plan."""
        inner, backend = self.inner, self.inner.backend
        if self.gradients is not None:
            self.gradients.gather()
        with_grad = [p for p in self.params() if self._has_grad(p)]
        names = self.names()
        self.follow(with_grad)
        new = [p for p in with_grad if self.store.location(p) is None]
        if new:
            for param in new:
                backend.check(param, names[id(param)])
            self.wait()
            self.reserve(new)
        found: dict[int, StreamedJob] = {}  # by id first: a state that follows its parameter renumbers the units
        ordinal = -1
        for group, options in zip(inner.param_groups, options_of_groups, strict=True):
            for param in group["params"]:
                ordinal += 1
                if id(param) not in found and self._has_grad(param):
                    found[id(param)] = self._job(param, options, names[id(param)], ordinal)
        for number, job in enumerate(found.values()):
            job.number = number
            if self.gradients is not None:  # now that no state moves any more
                job.grad = self.gradients.sum_of(job.param)
        return {self.store.location(job.param).unit: job for job in found.values()}

    def _has_grad(self, param: Tensor) -> bool:
        if self.gradients is not None:
            return self.gradients.has(param)
        return getattr(param, self.inner.grad_name, None) is not None

    def _job(self, param: Tensor, options: AdamOptions, name: str, ordinal: int) -> StreamedJob:
        inner, backend = self.inner, self.inner.backend
        local = backend.check(param, name)
        if self.gradients is not None:
            self.gradients.check(param, name)
            grad = self.gradients.sum_of(param)
        else:
            grad = checked_grad(param, local, getattr(param, inner.grad_name), name)
        job = backend.job(param, local, grad, inner.state[param], name, ordinal)
        kinds = [self.kinds.index(kind) if kind in job.states else -1 for kind in STATES]
        scaled = [kind in job.states and job.states[kind].scale is not None for kind in STATES]
        kinds += [self.kinds.index(scales_of(k)) if has else -1 for k, has in zip(STATES, scaled, strict=True)]
        return StreamedJob(
            **vars(job),
            options=options,
            refresh=job.formats.has_master and bool(backend.write_tracker.written([param], [local])),
            kinds=tuple(kinds),
            grad_kind=-1 if self.gradients is None else self.kinds.index(GRADS),
        )
