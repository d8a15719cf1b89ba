"""The making of a parameter's state, its following where the parameter goes, and the scales of its blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from statestream.formats import scale_count
from statestream.state.state_format import MASTER, STEP, StateFormat
from statestream.state.stored import SCALED, Stored
from statestream.tensors.local import is_fake, local_of, same_layout
from statestream.tensors.quantized import dequantized, is_quantized
from statestream.tensors.sharding import as_dtensor_like
from statestream.tensors.validate import count_of

__all__ = ["StateFactory", "check_not_torn"]


class StateFactory:
    """Makes states by a format. `scales` holds what `state` does not: the scales of each parameter's scaled states, by
    name; a checkpoint has values, which need none."""

    def __init__(self, state_format: StateFormat):
        self.state_format = state_format
        self.scales: dict[Tensor, dict[str, Tensor]] = {}
        self.torn: list[str] = []
        """Names of parameters that an error left updated in part, until a load succeeds."""

    def exports_to_host(self, asked: bool) -> bool:
        """Whether a state dict holds copies in host memory; `asked`: the optimizer's state_dict_cpu_offload."""
        return asked

    def stored(self, param: Tensor, name: str, tensor: Tensor) -> Stored:
        """A state of the parameter with its scales, where it has some. ValueError for what is no tensor."""
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} in the state of a parameter: expected a tensor, found {type(tensor).__name__}")
        if tensor.dtype not in SCALED:
            return Stored(tensor)
        return Stored(tensor, self.scales.get(param, {}).get(name), root=name == "exp_avg_sq")

    def all_stored(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state with tensors shaped as the parameter as Stored; all else as it is."""
        shaped = self.state_format.dtypes(param)
        return {name: self.stored(param, name, v) if name in shaped else v for name, v in state.items()}

    def with_scales(self, param: Tensor, state: dict[str, Any] | None) -> dict[str, Any]:
        """A parameter's state, if it has one yet, and its scales beside: all tensors that are kept for it."""
        scales = self.scales.get(param, {})
        return (state or {}) | {f"{name} scales": scale for name, scale in scales.items()}

    def check_whole(self) -> None:
        """RuntimeError where states were left updated in part."""
        check_not_torn(self.torn)

    def forget(self, param: Tensor) -> None:
        self.scales.pop(param, None)

    def make(self, param: Tensor) -> dict[str, Any]:
        """New state: zero moments, the master at the parameter's value, step 0.

        Tensors are laid out as the parameter is, on its device and mesh; `step` is a 0-dim float32.
        """
        step_device = local_of(param).device if self.state_format.step_on_device else "cpu"
        # A tensor made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            state: dict[str, Any] = {STEP: torch.zeros((), dtype=torch.float32, device=step_device)}
            for name, dtype in self.state_format.dtypes(param).items():
                state[name] = self._new(param, name, dtype)
        return state

    def follow(self, param: Tensor, state: dict[str, Any]) -> None:
        """Brings existing state to where the parameter is now.

        A parameter's data moves under it: `model.to(device)`, `to_empty`, a memory format, a dtype that
        needs a master or no longer does. Values are kept, but for state of a parameter that had no data.
        """
        dtypes = self.state_format.dtypes(param)
        target = local_of(param)
        if MASTER not in dtypes:
            state.pop(MASTER, None)
            self.scales.get(param, {}).pop(MASTER, None)
        for name, dtype in dtypes.items():
            if name not in state:
                state[name] = self._new(param, name, dtype)
                continue
            old = self.stored(param, name, state[name])
            if self._fits(old, dtype, target):
                continue
            state[name] = self._new(param, name, dtype)
            if old.tensor.shape == param.shape:
                self.carry(old, self.stored(param, name, state[name]))
        step_device = target.device if self.state_format.step_on_device else torch.device("cpu")
        step = self.step_in(state)
        if step.device != step_device or step.dtype is not torch.float32 or step is not state.get(STEP):
            state[STEP] = torch.zeros((), dtype=torch.float32, device=step_device)
            if not is_fake(step):
                state[STEP].copy_(step)

    def reset_master(self, param: Tensor, state: dict[str, Any]) -> None:
        """Sets the master to the parameter's value, in place."""
        master = self.stored(param, MASTER, state[MASTER])
        if master.local.dtype is torch.int16:
            master.local.zero_()
        else:
            master.write(_values(local_of(param)))

    def _new(self, param: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        # By the local tensor: a rank that the mesh leaves out has one too, which DTensor's zeros_like would replace.
        local = local_of(param.detach())
        if is_quantized(local):
            # empty_like of it would be quantised
            state = torch.empty_strided(local.shape, local.stride(), dtype=dtype, device=local.device)
        else:
            state = torch.empty_like(local, dtype=dtype)
        if dtype in SCALED:
            scales = torch.ones(scale_count(local.numel()), dtype=torch.float32, device=local.device)
            self.scales.setdefault(param, {})[name] = scales
        if name == MASTER and dtype is not torch.int16:
            self.stored(param, name, state).write(_values(local))
        else:
            state.zero_()
        return as_dtensor_like(state, param)

    @staticmethod
    def _fits(old: Stored, dtype: torch.dtype, target: Tensor) -> bool:
        local = old.local
        if local.device != target.device or local.dtype is not dtype or not same_layout(local, target):
            return False
        scale = old.scale
        return dtype not in SCALED or (
            scale is not None and scale.device == target.device and scale.numel() == scale_count(target.numel())
        )

    @staticmethod
    def step_in(state: dict[str, Any]) -> Tensor:
        """The counter in a parameter's state; a new one for a number that someone put there. ValueError for anything
        else."""
        step = state.get(STEP, 0)
        if isinstance(step, Tensor):
            return step
        return torch.tensor(count_of(step, "step in the state of a parameter"), dtype=torch.float32, device="cpu")

    @staticmethod
    def carry(old: Stored, new: Stored) -> None:
        """Values from one state to the one in its place, by local parts: no collective, no DTensor across devices.
        Nothing where the parameter had no data, another shape, or remainders where there is a master now."""
        a, b = old.local, new.local
        if a.shape != b.shape:
            return
        if (is_fake(a) and not is_fake(b)) or (a.dtype is torch.int16) != (b.dtype is torch.int16):
            return
        if a.dtype in SCALED:
            # The payload may have been moved by itself, or be a plain tensor that someone put there.
            count = scale_count(a.numel())
            known = old.scale is not None and old.scale.numel() == count
            scale = old.scale.to(a.device) if known else torch.ones(count, dtype=torch.float32, device=a.device)
            old = Stored(a, scale, root=old.root and known)
        new.take_over(old)


def _values(local: Tensor) -> Tensor:
    return dequantized(local) if is_quantized(local) else local


def check_not_torn(names: list[str]) -> None:
    """RuntimeError where any parameter is named."""
    if names:
        raise RuntimeError(
            f"an earlier step or load ended in an error that left {', '.join(names)} written in part; "
            "load a checkpoint of model and optimizer"
        )
