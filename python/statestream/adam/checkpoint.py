"""FusedAdam's checkpoints: state_dict and load_state_dict, and single states as FP32."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from statestream.adam.state_backend import StateBackend
from statestream.arguments import names_of
from statestream.checkpoint.export import export_on_device, export_to_host, taken_by_export
from statestream.checkpoint.state_dict import (
    LoadPlan,
    ParamLoad,
    as_kept,
    as_state_dict,
    pack_groups,
    plan_load,
    take_apart,
    tensors_of,
    update_group,
)
from statestream.checkpoint.transfer import Loader
from statestream.device.capture import refuse_capture
from statestream.interrupts import interrupts_held
from statestream.optimizer_hooks import call_hooks, through_hooks
from statestream.state.format_version import number_of
from statestream.state.lazy_state import LazyState
from statestream.state.state_format import MASTER, STEP, StateFormat
from statestream.state.stored import Stored
from statestream.tensors.local import copy_version, is_dense, is_dtensor, local_of
from statestream.tensors.sharding import shard_of

__all__ = ["Checkpointing"]

_IT_WAITS = "the host waits for copies; call it before or after the capture"


class Checkpointing:
    """The part of FusedAdam that leaves a process and comes back. What it needs of the rest:"""

    param_groups: list[dict[str, Any]]
    state: LazyState
    state_format: StateFormat
    state_dict_cpu_offload: bool
    export_staging_bytes: int
    _params: Callable[[], Iterable[Tensor]]
    _backend: StateBackend

    _exported: tuple[int | None, int | None] = (None, None)
    """Device and host bytes that the last export took."""
    _half_loaded = False
    _lent: dict[int, tuple[weakref.ref[Tensor], int | None]] | None = None
    """By storage the live tensors in the last state dict, and how often autograd had seen each written then, which
    counts no kernel's writes. It does count the stores of a streamed step, which sets None."""

    @torch._disable_dynamo
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state of every parameter that is trained or has been, moments and masters as float32.

        With state_dict_cpu_offload a snapshot in host memory; without, tensors on the parameter's device,
        those that are stored as float32 the live ones. DTensors stay DTensors, sharded as the parameter.
        """
        if self._exports_to_host:
            refuse_capture("state_dict() with state_dict_cpu_offload=True", _IT_WAITS)
        call_hooks(self._optimizer_state_dict_pre_hooks, self)
        with interrupts_held():
            state_dict = self._export()
        return through_hooks(self._optimizer_state_dict_post_hooks, self, state_dict)

    @property
    def _exports_to_host(self) -> bool:
        return self._backend.exports_to_host(self.state_dict_cpu_offload)

    def _export(self) -> dict[str, Any]:
        self.check_whole()
        to_host = self._exports_to_host
        groups, params = pack_groups(self.param_groups, snapshot=to_host)
        self._complete_state()
        index = {
            id(p): i
            for g, packed in zip(self.param_groups, groups, strict=True)
            for p, i in zip(g["params"], packed["params"], strict=True)
        }
        kept = [param for param in params if param in self.state]
        masters = {local_of(s[MASTER]).dtype for param in kept if MASTER in (s := self.state[param])}
        number = number_of(self.state_format.masters(others=bool(masters - {torch.int16})))
        for group in groups:
            group["format_version"] = number
        stored = self._as_stepped(kept, [self._backend.all_stored(param, self.state[param]) for param in kept])
        if to_host:
            exported, staging = export_to_host(stored, self.export_staging_bytes)
        else:
            exported, staging = export_on_device(stored), 0
        self._exported = taken_by_export([self.state[param] for param in kept], exported, staging)
        packed_state: dict[Any, Any] = {index[id(p)]: s for p, s in zip(kept, exported, strict=True)}
        other = {k: v for k, v in self.state.items() if not isinstance(k, Tensor)}
        packed_state.update(copy.deepcopy(other) if to_host else other)
        live = [{k: v for k, v in s.items() if v is self.state[p][k]} for p, s in zip(kept, exported, strict=True)]
        self._lend([] if to_host else tensors_of({"state": live, "param_groups": groups}))
        return {"state": packed_state, "param_groups": groups}

    def _lend(self, tensors: Iterable[Tensor]) -> None:
        self._lent = {t.untyped_storage()._cdata: (weakref.ref(t), copy_version(t)) for t in tensors}

    def _as_stepped(self, params: list[Tensor], states: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """States (StateFactory's all_stored) as the next step would start from them: it begins by bringing masters back
        to parameters that were written. Remainders are joined with whatever weight is there."""
        owners = {id(p): state for p, state in zip(params, states, strict=True) if _has_master(state)}
        members = [param for param in params if id(param) in owners]
        for param, local in self._backend.write_tracker.written(members, [local_of(param) for param in members]):
            if local.device.type != "meta" and is_dense(local):  # no step takes another
                state = owners[id(param)]
                state[MASTER] = replace(state[MASTER], written=local)
        return states

    def _complete_state(self) -> None:
        """State of exactly the members: of parameters replaced since gone, of trained ones there, so that
        every rank has the same keys."""
        members = {id(p) for p in self._params()}
        for key in [k for k in self.state if isinstance(k, Tensor) and id(k) not in members]:
            del self.state[key]
            self._backend.forget(key)
            self._backend.write_tracker.forget(key)
        for param in self._params():
            if param in self.state or (param.requires_grad and self._backend.takes(param)):
                self._backend.follow(param, self.state[param])

    @torch._disable_dynamo
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads in place: the state keeps its dtypes, device and addresses, whatever the dict holds.

        Takes dicts of FusedAdam, torch.optim.AdamW and Adam, and Transformer Engine's FusedAdam. A
        parameter that the dict has no state for starts anew; a master that it lacks is made from the
        parameter. What else a user keeps in a parameter's state is loaded where the optimizer has it too.

        Raises:
            ValueError: something does not fit, naming the parameter and the key. Nothing was changed (on
                this rank: no other rank is asked). Only where the dict is made of live tensors that were written
                since, as torch.distributed.checkpoint does, they are written: no step is made then, nor a state
                dict, until a load succeeds.
        """
        refuse_capture("load_state_dict()", _IT_WAITS)
        state_dict = through_hooks(self._optimizer_load_state_dict_pre_hooks, self, as_state_dict(state_dict))
        try:
            plan = plan_load(state_dict, self.param_groups, self.state_format, self.state)
            for load in plan.params:
                if load.values is not None:
                    self._check_can_have_state(load.param)
        except (ValueError, RuntimeError) as error:
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            if self._was_written(state_dict):
                self._half_loaded = True
                raise kind(
                    f"{error}; state_dict() gave live tensors, and the checkpoint was read into them: load one that "
                    "fits before the next step"
                ) from error
            raise kind(f"{error}; nothing was loaded on this rank") from error
        with interrupts_held():
            self._write(plan)
        call_hooks(self._optimizer_load_state_dict_post_hooks, self)

    def _write(self, plan: LoadPlan) -> None:
        take_apart(plan.params, self.state)
        with Loader(self.export_staging_bytes) as loader:
            # All memory is taken before anything is written: where there is too little, nothing has changed.
            copies = [copied for load in plan.params for copied in self._copies_of(load)]
            for values, stored in copies:
                loader.prepare(values, stored)
            kept = [self._others_of(load) for load in plan.params]
            self._half_loaded = True
            for load, other in zip(plan.params, kept, strict=True):
                self._load_param(load, other)
            for values, stored in copies:
                loader.copy(values, stored)
        self.state.update(plan.other)
        for group, loaded in zip(self.param_groups, plan.groups, strict=True):
            update_group(group, loaded)
        self._lend(live for reference, _ in (self._lent or {}).values() if (live := reference()) is not None)
        self._half_loaded = False
        self._backend.torn.clear()

    def _was_written(self, state_dict: dict[str, Any]) -> bool:
        """Whether the dict is made of live tensors, and somebody has written some of them."""
        for tensor in tensors_of(state_dict) if self._lent else ():
            reference, version = self._lent.get(tensor.untyped_storage()._cdata, (None, None))
            live = None if reference is None else reference()
            if live is not None and copy_version(live) != version:
                return True
        return False

    def check_whole(self) -> None:
        """RuntimeError after a load that ended in an error in the middle, or a step that could not be finished."""
        if self._half_loaded:
            raise RuntimeError(
                "an earlier load_state_dict ended in an error after it had begun to write; load a checkpoint again"
            )
        self._backend.check_whole()

    def _copies_of(self, load: ParamLoad) -> list[tuple[Tensor, Stored]]:
        """What is to be copied where, into state that is there, and in its form."""
        if load.values is None:
            return []
        state = self.state[load.param]
        self._backend.follow(load.param, state)
        return [(values, self._backend.stored(load.param, name, state[name])) for name, values in load.values.items()]

    def _others_of(self, load: ParamLoad) -> dict[str, Any]:
        """A user's own values, as they will be kept."""
        return {name: as_kept(value, self.state[load.param][name]) for name, value in load.other.items()}

    def _load_param(self, load: ParamLoad, other: dict[str, Any]) -> None:
        """All but the copies."""
        self._backend.write_tracker.forget(load.param)
        if load.values is None:
            self.state.pop(load.param, None)
            self._backend.forget(load.param)
            return
        state = self.state[load.param]
        state[STEP].fill_(load.step)
        state.update(other)
        if MASTER in state and MASTER not in load.values:
            self._backend.reset_master(load.param, state)

    @torch.no_grad()
    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        """A (local) state as FP32, remainders as int16: the live tensor where it is stored so, else a copy. A master is
        as the next step starts from it, and a copy where the weight was written and the master is another.

        With `skip_unscale` also a state that is stored as bfloat16 is the live tensor.
        """
        self.check_whole()
        state = self._state_named(param, state_name)
        if state_name == MASTER:
            state = self._as_stepped([param], [{MASTER: state}])[0][MASTER]
        return state.local if skip_unscale and state.local.dtype is torch.bfloat16 else state.values()

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Writes FP32 values (int16 remainders) into a state, in place, rounding to how it is stored.

        `unscaled_state` is shaped as the parameter; for a DTensor also as its local part, a plain tensor. A master that
        is set is what the next step starts from, whatever the weight is.
        """
        refuse_capture("set_scaled_state()", _IT_WAITS)
        state = self._state_named(param, state_name)
        wanted, values = state.exported, unscaled_state.detach()
        if values.shape == param.shape and values.dtype is wanted:
            values = shard_of(values, param, state_name, "this parameter")
        elif values.shape != state.local.shape or values.dtype is not wanted or is_dtensor(values):
            raise ValueError(
                f"{state_name}: expected {wanted} of shape {tuple(param.shape)}, found {values.dtype} "
                f"of {tuple(values.shape)}"
            )
        with Loader(self.export_staging_bytes) as loader:
            loader.copy(values, state)
        if state_name == MASTER:
            self._backend.write_tracker.remember([param], [local_of(param)])

    def _state_named(self, param: Tensor, name: str) -> Stored:
        self._check_can_have_state(param)
        state, kinds = self.state[param], self.state_format.dtypes(param)
        if name not in kinds:
            has = ", ".join(sorted(kinds))
            raise ValueError(f"state_name: {name!r} is not a state of this parameter; it has {has}")
        self._backend.follow(param, state)
        return self._backend.stored(param, name, state[name])

    def _check_can_have_state(self, param: Tensor) -> None:
        if not self._backend.takes(param):
            self._backend.check(param, names_of(self.param_groups).get(id(param), "parameter"))  # says why


def _has_master(state: dict[str, Any]) -> bool:
    master = state.get(MASTER)
    return isinstance(master, Stored) and master.local.dtype is not torch.int16
