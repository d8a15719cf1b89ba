"""Every way FusedAdam stores parameters and state, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

__all__ = ["BF16", "FORMS", "FP8", "FP16", "FP32", "MODES", "Mode"]

FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
_SHORT = {FP32: "fp32", BF16: "bf16", FP16: "fp16", FP8: "fp8"}


@dataclass(frozen=True)
class Mode:
    """`param` is a dtype, or None for a model that mixes float32 and bfloat16 parameters."""

    param: torch.dtype | None
    exp_avg: torch.dtype = torch.float32
    exp_avg_sq: torch.dtype = torch.float32
    master: str | None = None
    """None, "fp32", "fp16" or "remainders"."""
    offload: bool = False
    """Whether state_dict() exports to host memory."""
    stochastic: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "exp_avg_dtype": self.exp_avg,
            "exp_avg_sq_dtype": self.exp_avg_sq,
            "master_weights": self.master is not None,
            "master_weight_dtype": FP16 if self.master == "fp16" else FP32,
            "store_param_remainders": self.master == "remainders",
            "state_dict_cpu_offload": self.offload,
            "stochastic_rounding": self.stochastic,
        }

    @property
    def param_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that the parameters of a model take by turns."""
        return (torch.float32, torch.bfloat16) if self.param is None else (self.param,)

    @property
    def has_scales(self) -> bool:
        """Whether blocks of elements share scales, so that values hang on how a tensor is cut."""
        return bool({self.exp_avg, self.exp_avg_sq} & {FP16, FP8}) or self.master == "fp16"

    def by_random_bits(self, name: str) -> bool:
        """Whether that tensor ("param" for the parameter) is rounded so; a scaled exp_avg_sq always is."""
        if name == "exp_avg_sq" and self.exp_avg_sq in (FP16, FP8):
            return True
        return self.stochastic and (name in ("exp_avg", "exp_avg_sq") or (name == "param" and self.master is None))

    @property
    def is_random(self) -> bool:
        """Whether bits hang on a parameter's place among the others."""
        return any(map(self.by_random_bits, ("exp_avg", "exp_avg_sq", "param")))

    def stored(self, param: torch.Tensor) -> dict[str, torch.dtype]:
        """Names and dtypes of the tensors that the state of `param` must hold, `step` aside."""
        names = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        if self.master is not None and param.dtype is not FP32:
            kept = {"fp32": FP32, "fp16": FP16, "remainders": torch.int16 if param.dtype is BF16 else FP32}
            names["master_param"] = kept[self.master]
        return names

    def __str__(self) -> str:
        param = "mixed" if self.param is None else _SHORT[self.param]
        moments = f"m-{_SHORT[self.exp_avg]},v-{_SHORT[self.exp_avg_sq]}"
        where = f"{'host' if self.offload else 'device'}{',stochastic' if self.stochastic else ''}"
        return f"{param},{moments},master-{self.master},{where}"


_MOMENTS = tuple(product((FP32, BF16), repeat=2))

_EXACT = tuple(
    Mode(param, exp_avg, exp_avg_sq, master)
    for param in (FP32, BF16, None)
    for exp_avg, exp_avg_sq in _MOMENTS
    for master in (None, "fp32", "remainders")
    if not (param is FP32 and master == "remainders")
)
"""Every combination of parameter, moment and master formats that have no scales. float32 parameters are their own
masters, with master_weights=True as well."""

_WITH_SCALES = tuple(
    Mode(param, exp_avg, exp_avg_sq, master)
    for exp_avg, exp_avg_sq in product((FP32, BF16, FP16, FP8), repeat=2)
    if {exp_avg, exp_avg_sq} & {FP16, FP8}
    for param, master in ((FP32, None), (BF16, "remainders"), (FP16, "fp16"))
)
_OF_FLOAT16 = tuple(Mode(FP16, BF16, FP32, master) for master in (None, "fp32", "fp16", "remainders"))
_WITH_SMALL_MASTERS = (Mode(BF16, FP32, FP32, "fp16"), Mode(BF16, FP8, FP8, "fp16"), Mode(None, BF16, FP8, "fp16"))
_BY_RANDOM_BITS = (
    Mode(BF16, BF16, BF16, None, stochastic=True),
    Mode(BF16, FP8, FP16, None, stochastic=True),
    Mode(None, BF16, FP8, "fp32", stochastic=True),
)

FORMS = (*_EXACT, *_WITH_SCALES, *_OF_FLOAT16, *_WITH_SMALL_MASTERS, *_BY_RANDOM_BITS)
"""Every format of each tensor, the scaled ones in every pair of moments."""

MODES = tuple(replace(form, offload=offload) for form in FORMS for offload in (False, True))
"""Every form, exported by reference and to the host."""
