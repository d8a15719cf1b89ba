"""Any elementwise torch optimizer: its state in host memory, stepped some whole parameters at a time.

While a chunk is stepped the optimizer sees the chunk's parameters and gradients alone, and state tensors that lie
in the ring. What its step counts for itself (a group's step, say) is set back between chunks, so that all chunks
of a step count as one. The parameters of a chunk are copied aside first: if the step fails they are put back,
and the state on the host is still the old one. That room is part of the budget.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from statestream.adam.grad_scaling import is_skipped
from statestream.offload.host.store import Entry, compact_copy, largest_shard
from statestream.offload.per_parameter.infer_state import (
    StateKind,
    check_plain,
    infer_state,
    is_host_scalar,
    unhooked_step,
)
from statestream.offload.per_parameter.member import Member
from statestream.offload.per_parameter.subset import Subset
from statestream.offload.strategy import Strategy
from statestream.streaming import pipeline
from statestream.streaming.pipeline import Stage
from statestream.streaming.plan import Unit, padded_bytes
from statestream.tensors.local import address_of, is_dtensor, local_of
from statestream.tensors.sharding import as_dtensor_like

__all__ = ["PerParameterStrategy"]


class PerParameterStrategy(Strategy):
    """Keeps `inner`'s state in arenas and steps it through `device`, parameters whole, in chunks of at most
    `budget` bytes (None: all in one pass)."""

    def __init__(self, inner: torch.optim.Optimizer, device: Any, budget: int | None):
        super().__init__(inner, device, budget)
        self.members: dict[int, Member] = {}
        self._learnt: dict[Any, tuple[list[StateKind], list[StateKind]]] = {}
        self._warned = False
        self.call = unhooked_step(inner)
        existing = {p: s for p, s in inner.state.items() if isinstance(p, Tensor) and s}
        self.adopt(existing)

    # ---- state ----

    def adopt(self, existing: dict[Tensor, dict[str, Any]] | None = None) -> None:
        """Host memory for every trained member, and `existing` state moved there."""
        existing = existing or {}
        self.reserve([p for p in self.params() if p in existing or (p.requires_grad and not is_lazy(p))])
        with torch.no_grad():
            moved = {
                param: self._to_host(self.members[id(param)], state)
                for param, state in existing.items()
                if id(param) in self.members
            }
        self.inner.state.update(moved)  # all or, after an error, none

    def reserve(self, params: Sequence[Tensor], anew: Collection[int] = ()) -> None:
        """Host memory for those of `params` that have none yet, in one bank. Contents stay to be made by the
        optimizer's own first step. State of the parameters whose ids are `anew` is about to be replaced."""
        members = {id(p): None for p in self.params()}
        self.store.keep(list(self.params()))
        self.members = {key: m for key, m in self.members.items() if key in members and self.store.locations.get(key)}
        wanted = {id(p) for p in params if self.store.location(p) is None}
        new: list[Member] = []
        planned: dict[int, list[StateKind]] = {}
        names = self.names()
        for number, group in enumerate(self.inner.param_groups):
            for param in group["params"]:
                if id(param) in wanted:
                    wanted.discard(id(param))
                    state = {} if id(param) in anew else self.inner.state.get(param) or {}
                    kinds, largest = self._kinds(group, number, param, state)
                    new.append(Member(param, names[id(param)], {k.name: k for k in kinds}))
                    planned[id(param)] = largest
        if not new:
            return
        kinds = tuple(dict.fromkeys(name for m in new for name in m.kinds))
        entries = []
        for together in self._together(new):
            first = len(entries)
            entries += [self._entry(m, planned[id(m.param)], kinds) for m in together]
            entries[first + 1 :] = [replace(e, unit=replace(e.unit, joined=True)) for e in entries[first + 1 :]]
        self.store.add(kinds, entries)
        self.members.update((id(m.param), m) for m in new)

    def _together(self, members: list[Member]) -> list[list[Member]]:
        """The members in the order in which they stream, as runs that can only be stepped in one chunk."""
        return [[member] for member in members]

    def kinds_to_load(self, param: Tensor) -> dict[str, StateKind]:
        """What state of the parameter would be loaded into, after `make_room` for it."""
        member = self.members[id(param)]
        if not member.outgrown:
            return member.kinds
        group, number = next(
            (group, number)
            for number, group in enumerate(self.inner.param_groups)
            if any(p is param for p in group["params"])
        )
        return {kind.name: kind for kind in self._kinds(group, number, param, {})[0]}

    def make_room(self, params: Iterable[Tensor]) -> None:
        """Before state of these parameters is made or replaced: room for it where they changed."""
        changed = {id(p): p for p in params if self.members[id(p)].outgrown}
        if changed:
            self.wait()
            for param in changed.values():
                self.store.leave(param)
            self.reserve(list(changed.values()), changed)

    def _kinds(
        self, group: dict[str, Any], number: int, param: Tensor, state: Mapping[str, Any]
    ) -> tuple[list[StateKind], list[StateKind]]:
        """State of the local shard, and of the largest one."""
        local, largest = tuple(local_of(param).shape), largest_shard(param)
        held = tuple((n, v.dtype, tuple(local_of(v).shape)) for n, v in state.items() if isinstance(v, Tensor))
        found = []
        for shape in (local, largest):
            key = (number, shape, param.dtype, local_of(param).device, held)
            if key not in self._learnt:
                self._learnt[key] = infer_state(self.inner, group, shape, param, state, self.names()[id(param)])
            found.append(self._learnt[key])
        return found[0], found[1]

    @staticmethod
    def _entry(member: Member, planned: list[StateKind], names: tuple[str, ...]) -> Entry:
        def nbytes(kinds: dict[str, StateKind]) -> list[int]:
            return [padded_bytes(kinds[n].numel, kinds[n].dtype.itemsize) if n in kinds else 0 for n in names]

        local = nbytes(member.kinds)
        largest = [max(a, b) for a, b in zip(nbytes({k.name: k for k in planned}), local, strict=True)]
        undo = padded_bytes(prod(largest_shard(member.param)), member.dtype.itemsize)
        undo_bytes = max(undo, member.undo_bytes) if any(largest) else 0
        return Entry(member.param, Unit((*largest, undo_bytes)), tuple(local))

    def _to_host(self, member: Member, state: dict[str, Any]) -> dict[str, Any]:
        """A state dict whose tensors are the arenas' views, with the values of `state`."""
        host: dict[str, Any] = {}
        for name, value in state.items():
            check_plain(value, name, member.name)
            if name in member.kinds and isinstance(value, Tensor):
                host[name] = self._bound(member, name, value)
                local_of(host[name]).copy_(local_of(value))
            else:
                host[name] = value.to("cpu") if isinstance(value, Tensor) else value
        return host

    @torch.inference_mode(False)  # a view of inference mode could not be written outside of it
    @torch.no_grad()
    def _bound(self, member: Member, name: str, like: Tensor) -> Tensor:
        """The state's tensor in host memory, distributed as `like` is."""
        bound = member.bound.get(name)
        if bound is None or is_dtensor(bound) != is_dtensor(like):
            bound = member.bound[name] = as_dtensor_like(self._host_view(member, name), like)
        return bound

    def take_back(self, members: Iterable[Member]) -> None:
        """Brings tensors that someone put in the state, as trainers do which move all they find to the device, into
        the state's own memory."""
        for member in members:
            state = self.inner.state.get(member.param) or {}
            if any(isinstance(state.get(n), Tensor) and state[n] is not member.bound.get(n) for n in member.kinds):
                self.wait()
                taken = self._to_host(member, self._checked(member))
                state.clear()
                state.update(taken)

    def _host_view(self, member: Member, name: str) -> Tensor:
        location = self.store.location(member.param)
        arena = next(a for a in location.bank.arenas if a.kind == name)
        begin = arena.offsets[location.index]
        return member.shaped(arena.block[begin : begin + arena.sizes[location.index]], name)

    def fill(self, param: Tensor, name: str, local: Tensor) -> Tensor:
        """Writes a saved state into its place; returns the state tensor."""
        member = self.members[id(param)]
        like = param if member.kinds[name].shape == tuple(local_of(param).shape) else local
        state = self._bound(member, name, like)
        local_of(state).copy_(local)
        return state

    def detached(self) -> torch.optim.Optimizer:
        twin = super().detached()
        twin.state = defaultdict(dict)
        for key, state in self.inner.state.items():
            twin.state[key] = compact_copy(state)
        return twin

    # ---- the step ----

    def update(self, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """One step of the optimizer, chunk by chunk. Settings and scaling are the optimizer's own affair."""
        if is_skipped(found_inf):
            return
        with_grad = self._with_grad()
        self._step({self.store.location(p).unit: self.members[id(p)] for p in with_grad})

    def _step(self, jobs: dict[int, Member]) -> None:
        """The step of these members, by their units: all that have a gradient."""
        with Subset(self.inner, self.call) as subset:
            if not jobs or not self.store.layout.plan.ring_bytes:
                subset.update([m.param for m in jobs.values()])  # without parameters it counts the step
                return
            one_pass = self.store.budget is None
            old = {u: m for u, m in jobs.items() if one_pass or self.inner.state.get(m.param)}
            self._stream(old, subset)
            self._create([m for u, m in jobs.items() if u not in old], subset)

    def _with_grad(self) -> list[Tensor]:
        """The parameters that have a gradient, their state in its place."""
        params = list({id(p): p for p in self.params() if p.grad is not None}.values())
        if not params:
            self.check_gradients()
        self.follow(params)
        outgrown = [p for p in params if id(p) in self.members and self.members[id(p)].outgrown]
        if outgrown or any(self.store.location(p) is None for p in params):
            self.wait()
            for param in outgrown:
                self.store.leave(param)
            self.reserve(params)
        self.take_back(self.members[id(p)] for p in params)
        return params

    def _stream(self, jobs: dict[int, Member], subset: Subset) -> None:
        if not jobs:
            return
        layout = self.store.layout
        stages = layout.stages(None if len(jobs) == len(layout.units) else jobs.keys())
        flow = _Flow(self, layout, jobs, subset)
        self.took(layout.plan.ring_bytes)
        self.inner_hooks.stored(self.device, pipeline.run(self.device, layout.plan.ring_bytes, stages, flow))

    def _create(self, members: list[Member], subset: Subset) -> None:
        """First steps: the optimizer makes the state on the device, where it is as large as the budget allows, and
        it moves to the host before the next is made. One thing at a time: it happens once."""
        run: list[Member] = []
        room = self.store.budget or 0
        for member in [*members, None]:
            nbytes = 0 if member is None else member.state_bytes + member.undo_bytes
            if run and (member is None or nbytes > room):
                self._create_run(run, subset)
                run, room = [], self.store.budget or 0
            if member is not None:
                run.append(member)
                room -= nbytes

    def _create_run(self, members: list[Member], subset: Subset) -> None:
        self.took(sum(m.state_bytes + m.undo_bytes for m in members))
        with self.device.computing():
            try:
                with subset.updating([m.param for m in members]):
                    made = {id(m.param): self._to_host(m, self._checked(m)) for m in members}
            except BaseException:
                for m in members:
                    self.inner.state.pop(m.param, None)
                raise
            for m in members:
                self.inner.state[m.param] = made[id(m.param)]

    def _checked(self, member: Member) -> dict[str, Any]:
        """The member's state as the optimizer left it. ValueError where a tensor is not what was learnt."""
        state = self.inner.state.get(member.param, {})
        device = self.device.torch_device
        for name, value in state.items():
            check_plain(value, name, member.name)
            kind = member.kinds.get(name)
            if kind is None:
                if not is_host_scalar(value, device) and not self._warned:
                    self._warned = True
                    warnings.warn(
                        f"state {name!r} of {member.name} was not made by the optimizer's first step; it is moved by "
                        f"itself, and its {value.numel() * value.element_size()} bytes are not part of the budget",
                        RuntimeWarning,
                        stacklevel=2,
                    )
            elif isinstance(value, Tensor) and value.layout is not torch.strided:
                raise ValueError(
                    f"state {name!r} of {member.name} is {value.layout}, as a sparse gradient makes it, and only dense "
                    "state is streamed; pass per_parameter=False to move all of it in one pass"
                )
            elif isinstance(value, Tensor) and (
                tuple(local_of(value).shape) != kind.shape or local_of(value).dtype is not kind.dtype
            ):
                raise ValueError(
                    f"state {name!r} of {member.name} is {value.dtype} of local shape {tuple(local_of(value).shape)}; "
                    f"the first step made it {kind.dtype} of {kind.shape}"
                )
        return state


class _Flow:
    """A pipeline.Stepper for one step: each chunk is wholly done or wholly undone."""

    def __init__(self, owner: PerParameterStrategy, layout: Any, jobs: dict[int, Member], subset: Subset):
        self.owner, self.layout, self.jobs, self.subset = owner, layout, jobs, subset
        self.updated: set[int] = set()

    def step(self, stage: Stage, ring: Tensor) -> None:
        owner, state = self.owner, self.owner.inner.state
        pieces = [p for p in stage.chunk.pieces if p.unit in self.jobs]
        members = [self.jobs[p.unit] for p in pieces]
        with owner.device.computing():
            undo = self._undo_room(stage, ring, pieces)
            slots = [self._slots(stage, ring, p) for p in pieces]
            hosts = [state.get(m.param) for m in members]
            try:
                for m, host, slot in zip(members, hosts, slots, strict=True):
                    if host:
                        state[m.param] = {
                            name: self._onto_device(value, slot.get(name)) for name, value in host.items()
                        }
                with self.subset.updating([m.param for m in members], undo):
                    news = [self._off_device(m, slot) for m, slot in zip(members, slots, strict=True)]
            except BaseException:
                for m, host in zip(members, hosts, strict=True):
                    self._put(m, host)
                raise
        for m, host, new in zip(members, hosts, news, strict=True):
            if host:  # whoever holds the dict goes on seeing the state
                host.clear()
                host.update(new)
            self._put(m, host or new)
        self.updated.update(p.unit for p in pieces)

    def keeps(self, stage: Stage) -> bool:
        return False

    def begun(self, stage: Stage) -> bool:
        return False

    def finish(self, stage: Stage, ring: Tensor) -> None:
        raise AssertionError("a chunk is done or undone as a whole")

    def torn(self, stages: Sequence[Stage], error: BaseException) -> None:
        lost = {p.unit for stage in stages for p in stage.chunk.pieces} & self.updated
        self.owner.torn.extend(self.jobs[unit].name for unit in sorted(lost))

    def _put(self, member: Member, state: dict[str, Any] | None) -> None:
        if state is None:
            self.owner.inner.state.pop(member.param, None)
        else:
            self.owner.inner.state[member.param] = state

    def _undo_room(self, stage: Stage, ring: Tensor, pieces: list[Any]) -> list[Tensor]:
        kind = len(stage.chunk.sizes) - 1
        rooms = []
        for piece in pieces:
            local = local_of(self.jobs[piece.unit].param)
            at = self.layout.place(stage.chunk, piece, kind)
            if self.layout.units[piece.unit].sizes[kind]:
                values = ring[at : at + local.numel() * local.element_size()].view(local.dtype)
                rooms.append(values.view(local.shape))
            else:  # a parameter without state among others that have some
                rooms.append(local.clone())
        return rooms

    def _slots(self, stage: Stage, ring: Tensor, piece: Any) -> dict[str, Tensor]:
        member = self.jobs[piece.unit]
        location = self.owner.store.location(member.param)
        slots = {}
        for number, arena in enumerate(location.bank.arenas):
            if arena.kind in member.kinds:
                at = self.layout.place(stage.chunk, piece, number)
                slots[arena.kind] = member.shaped(ring[at : at + arena.sizes[location.index]], arena.kind)
        return slots

    def _onto_device(self, value: Any, slot: Tensor | None) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if slot is not None:
            return as_dtensor_like(slot, value)
        return value.clone() if value.dim() == 0 else value.to(self.owner.device.torch_device, copy=True)

    def _off_device(self, member: Member, slots: dict[str, Tensor]) -> dict[str, Any]:
        """The new host state; what the optimizer made anew or put elsewhere is brought into the ring first."""
        new: dict[str, Any] = {}
        for name, value in self.owner._checked(member).items():
            slot = slots.get(name)
            if isinstance(value, Tensor) and slot is not None:
                local = local_of(value)
                if address_of(local) != address_of(slot) or local.stride() != slot.stride():
                    slot.copy_(local)
                new[name] = self.owner._bound(member, name, value)
            else:
                new[name] = value.to("cpu") if isinstance(value, Tensor) else value
        return new
