"""Every way FusedAdam stores parameters and state, as data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

__all__ = ["FORMS", "MODES", "Mode"]

_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Mode:
    """`param` is a dtype, or None for a model that mixes float32 and bfloat16 parameters."""

    param: torch.dtype | None
    exp_avg: torch.dtype = torch.float32
    exp_avg_sq: torch.dtype = torch.float32
    master: str | None = None
    """None, "fp32" or "remainders"."""
    offload: bool = False
    """Whether state_dict() exports to host memory."""

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "exp_avg_dtype": self.exp_avg,
            "exp_avg_sq_dtype": self.exp_avg_sq,
            "master_weights": self.master is not None,
            "store_param_remainders": self.master == "remainders",
            "state_dict_cpu_offload": self.offload,
        }

    @property
    def param_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that the parameters of a model take by turns."""
        return (torch.float32, torch.bfloat16) if self.param is None else (self.param,)

    def stored(self, param: torch.Tensor) -> dict[str, torch.dtype]:
        """Names and dtypes of the tensors that the state of `param` must hold, `step` aside."""
        names = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        if self.master is not None and param.dtype is torch.bfloat16:
            names["master_param"] = torch.int16 if self.master == "remainders" else torch.float32
        return names

    def __str__(self) -> str:
        param = "mixed" if self.param is None else _SHORT[self.param]
        moments = f"m-{_SHORT[self.exp_avg]},v-{_SHORT[self.exp_avg_sq]}"
        return f"{param},{moments},master-{self.master},{'host' if self.offload else 'device'}"


_MOMENTS = tuple(product((torch.float32, torch.bfloat16), repeat=2))

FORMS = tuple(
    Mode(param, exp_avg, exp_avg_sq, master)
    for param in (torch.float32, torch.bfloat16, None)
    for exp_avg, exp_avg_sq in _MOMENTS
    for master in (None, "fp32", "remainders")
    if not (param is torch.float32 and master == "remainders")
)
"""Every combination of parameter, moment and master formats. float32 parameters are their own masters,
with master_weights=True as well."""

MODES = tuple(
    Mode(form.param, form.exp_avg, form.exp_avg_sq, form.master, offload) for form in FORMS for offload in (False, True)
)
"""Every form, exported by reference and to the host."""
