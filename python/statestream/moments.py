"""How a parameter's state is stored: names, dtypes, layout, and its making and following."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statestream.quantized import dequantized, is_quantized
from statestream.sharding import around
from statestream.tensors import is_fake, local_of, same_layout

__all__ = ["MASTER", "MOMENTS", "STEP", "StateFormat"]

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"
STEP = "step"


@dataclass(frozen=True)
class StateFormat:
    """What FusedAdam's arguments say of the state."""

    exp_avg: torch.dtype = torch.float32
    exp_avg_sq: torch.dtype = torch.float32
    master_weights: bool = False
    remainders: bool = False
    step_on_device: bool = False

    @property
    def master_dtype(self) -> torch.dtype | None:
        """Stored dtype of the master of a parameter that is not float32; None without masters."""
        if not self.master_weights:
            return None
        return torch.int16 if self.remainders else torch.float32

    def dtypes(self, param: Tensor) -> dict[str, torch.dtype]:
        """Stored dtype of each tensor shaped like the parameter. A float32 parameter is its own master; a quantised
        one has an FP32 master whatever its nominal dtype: 16 bits more would not give its values back."""
        dtypes = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        if self.master_dtype is not None:
            if is_quantized(local_of(param)):
                dtypes[MASTER] = torch.float32
            elif param.dtype is not torch.float32:
                dtypes[MASTER] = self.master_dtype
        return dtypes

    def exported_dtype(self, stored: torch.dtype) -> torch.dtype:
        """Remainders are bits and leave as they are; every number leaves as FP32."""
        return stored if stored is torch.int16 else torch.float32

    def check(self, local: Tensor, name: str) -> None:
        """Raises RuntimeError for a (local) parameter that cannot have such state."""
        if not is_quantized(local):
            return
        kind = f"{name}: a parameter of class {type(local).__name__} is updated through an FP32 master"
        if not self.master_weights:
            raise RuntimeError(f"{kind}; use master_weights=True")
        if self.step_on_device:
            raise RuntimeError(f"{kind} and then quantised, which no CUDA graph holds; use capturable=False")

    def make(self, param: Tensor) -> dict[str, Any]:
        """New state: zero moments, the master at the parameter's value, step 0.

        Tensors are laid out as the parameter is, on its device and mesh; `step` is a 0-dim float32.
        """
        step_device = local_of(param).device if self.step_on_device else "cpu"
        # A tensor made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            state: dict[str, Any] = {STEP: torch.zeros((), dtype=torch.float32, device=step_device)}
            for name, dtype in self.dtypes(param).items():
                state[name] = self._new(param, name, dtype)
        return state

    def follow(self, param: Tensor, state: dict[str, Any]) -> None:
        """Brings existing state to where the parameter is now.

        A parameter's data moves under it: `model.to(device)`, `to_empty`, a memory format, a dtype that
        needs a master or no longer does. Values are kept, but for state of a parameter that had no data.
        """
        dtypes = self.dtypes(param)
        target = local_of(param)
        for name in [n for n in state if n == MASTER and n not in dtypes]:
            del state[name]
        for name, dtype in dtypes.items():
            old = state.get(name)
            if old is None:
                state[name] = self._new(param, name, dtype)
                continue
            local = local_of(old)
            if local.device == target.device and local.dtype is dtype and same_layout(local, target):
                continue
            new = self._new(param, name, dtype)
            if old.shape == param.shape and not (is_fake(local) and not is_fake(target)):
                _copy_values(old, new)
            state[name] = new
        if STEP not in state:
            state[STEP] = torch.zeros((), dtype=torch.float32)
        step_device = target.device if self.step_on_device else torch.device("cpu")
        if state[STEP].device != step_device:
            old_step = state[STEP]
            state[STEP] = torch.zeros((), dtype=torch.float32, device=step_device)
            if not is_fake(old_step):
                state[STEP].copy_(old_step)

    def reset_master(self, param: Tensor, state: dict[str, Any]) -> None:
        """Sets the master to the parameter's value, in place."""
        master, local = local_of(state[MASTER]), local_of(param)
        if master.dtype is torch.int16:
            master.zero_()
        else:
            master.copy_(_values(local))

    @staticmethod
    def _new(param: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        # By the local tensor: a rank that the mesh leaves out has one too, which DTensor's zeros_like would replace.
        local = local_of(param.detach())
        if is_quantized(local):
            # empty_like of it would be quantised
            state = torch.empty_strided(local.shape, local.stride(), dtype=dtype, device=local.device)
        else:
            state = torch.empty_like(local, dtype=dtype)
        if name == MASTER and dtype is not torch.int16:
            state.copy_(_values(local))
        else:
            state.zero_()
        return around(state, param)


def _values(local: Tensor) -> Tensor:
    return dequantized(local) if is_quantized(local) else local


def _copy_values(old: Tensor, new: Tensor) -> None:
    """By local parts where both have the same share: no collective, and no DTensor across devices."""
    a, b = local_of(old), local_of(new)
    if a.shape == b.shape:
        b.copy_(a)
