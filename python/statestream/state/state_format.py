"""How a parameter's state is stored: names and dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from statestream.state.format_version import Masters
from statestream.state.stored import SCALED
from statestream.tensors.local import local_of
from statestream.tensors.quantized import is_quantized

__all__ = ["MASTER", "MOMENTS", "STATES", "STEP", "StateFormat"]

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master_param"
STATES = (*MOMENTS, MASTER)
"""The states that are shaped as their parameter."""
STEP = "step"


@dataclass(frozen=True)
class StateFormat:
    """What FusedAdam's arguments say of the state."""

    exp_avg: torch.dtype = torch.float32
    exp_avg_sq: torch.dtype = torch.float32
    master_weights: bool = False
    master: torch.dtype = torch.float32
    remainders: bool = False
    step_on_device: bool = False

    @property
    def master_dtype(self) -> torch.dtype | None:
        """Stored dtype of the master of a bfloat16 parameter; None without masters."""
        if not self.master_weights:
            return None
        return torch.int16 if self.remainders else self.master

    def masters(self, others: bool = False) -> Masters:
        """What a checkpoint of it holds; `others`: there are masters of parameters that are not bfloat16."""
        if not self.master_weights:
            return Masters.NONE
        if not self.remainders:
            return Masters.FP32
        return Masters.BOTH if others else Masters.REMAINDERS

    @property
    def has_scales(self) -> bool:
        return any(self.dtype_of(name) in SCALED for name in STATES)

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Stored dtype of that state of a bfloat16 parameter."""
        return self.master_dtype if name == MASTER else getattr(self, name)

    def dtypes(self, param: Tensor) -> dict[str, torch.dtype]:
        """Stored dtype of each tensor shaped like the parameter.

        Of a quantised parameter's master 16 bits more would not give a value back: it has an FP32 master.
        """
        dtypes = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        quantised = self.master_weights and is_quantized(local_of(param))
        master = torch.float32 if quantised else self.master_of(param.dtype)
        if master is not None:
            dtypes[MASTER] = master
        return dtypes

    def master_of(self, dtype: torch.dtype) -> torch.dtype | None:
        """Stored dtype of the master of a parameter of this dtype; None where it has none. A float32 parameter is its
        own master. Remainders are of bfloat16 parameters: a float16 one has an FP32 master in their place."""
        if not self.master_weights or dtype is torch.float32:
            return None
        return torch.float32 if self.remainders and dtype is torch.float16 else self.master_dtype

    def check(self, local: Tensor, name: str) -> None:
        """Raises RuntimeError for a (local) parameter that cannot have such state."""
        if not is_quantized(local):
            return
        kind = f"{name}: a parameter of class {type(local).__name__} is updated through an FP32 master"
        if not self.master_weights:
            raise RuntimeError(f"{kind}; use master_weights=True")
        if self.master is not torch.float32:
            raise RuntimeError(f"{kind}, not one of {self.master}; use master_weight_dtype=torch.float32")
        if self.step_on_device:
            raise RuntimeError(f"{kind} and then quantised, which no CUDA graph holds; use capturable=False")
