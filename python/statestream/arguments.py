"""Arguments at the door: each bad one is one error that names it and says what would do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from statestream.formats import REMAINDERS, Role, dtypes_of, formats_of, plain_name
from statestream.tensors.local import is_fake

__all__ = [
    "HOW_TORCH_RUNS",
    "as_bytes",
    "as_dtype",
    "as_number",
    "as_numbers",
    "check_grad_dtype",
    "check_group_options",
    "check_param",
    "name_in",
    "names_of",
]

HOW_TORCH_RUNS = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}
"""Settings of a group that say how an optimizer runs here, as torch has them by default. No checkpoint changes them."""

PARAM_DTYPES = dtypes_of(Role.PARAMETER)
GRAD_DTYPES = dtypes_of(Role.GRADIENT)


def as_dtype(name: str, value: torch.dtype | str, role: Role) -> torch.dtype:
    """`value` as the dtype that stores such numbers; strings as config files hold them: "torch.bfloat16", "bfloat16",
    "bf16". FP8 is E4M3, stored as torch.uint8."""
    numbers = {f.name: f.dtype for f in formats_of(role).values() if f is not REMAINDERS}
    dtype = numbers.get(plain_name(value))
    if dtype is None:
        raise ValueError(f"{name}: {value!r} is not supported; use {_join(tuple(numbers.values()))}")
    return dtype


def as_number(value: float | Tensor) -> float:
    """A number, also out of a tensor of one element on any device."""
    return float(value.item()) if isinstance(value, Tensor) else float(value)


def as_numbers(values: Sequence[float | Tensor]) -> list[float]:
    """Numbers, as `as_number` gives them. The host waits for each device once, however many are there."""
    numbers: list[float] = [0.0] * len(values)
    together: dict[torch.device, list[int]] = {}
    for i, value in enumerate(values):
        if type(value) in (Tensor, torch.nn.Parameter) and not is_fake(value):
            together.setdefault(value.device, []).append(i)
        else:
            numbers[i] = as_number(value)
    for places in together.values():
        if len(places) == 1:
            found = [values[places[0]].item()]
        else:
            found = torch.stack([values[i].detach().reshape(()).to(torch.float64) for i in places]).tolist()
        for i, number in zip(places, found, strict=True):
            numbers[i] = float(number)
    return numbers


def as_bytes(name: str, value: int, least: int) -> int:
    """A number of bytes."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
        raise ValueError(f"{name}: {value!r} is not valid; give a number of bytes, {least} or more")
    return int(value)


def check_group_options(group: dict[str, Any], where: str = "") -> None:
    """Raises ValueError for settings with which Adam would silently go wrong."""

    def refuse(name: str, value: Any, wanted: str) -> None:
        raise ValueError(f"{name}{where}: {value!r} is not valid; it must be {wanted}")

    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        refuse("lr", lr, "a number or a tensor of one element")
    betas = group["betas"]
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        refuse("betas", betas, "a pair of numbers")
    for beta in betas:
        if not _is_number(beta) or not 0.0 <= as_number(beta) < 1.0:
            refuse("betas", betas, "two numbers from 0 up to, not including, 1")
    for name in ("lr", "eps", "weight_decay", "step"):
        if not _is_left_unread(group[name]) and not _finite_from_zero(group[name]):
            refuse(name, group[name], "finite and at least 0")
    for name in ("amsgrad", "maximize", "bias_correction"):
        if not _is_flag(group.get(name)):
            refuse(name, group[name], "True or False")
    if group.get("amsgrad"):
        raise RuntimeError(
            f"amsgrad{where}: FusedAdam does not support the AMSGrad variant; use torch.optim.AdamW for it"
        )
    if group.get("differentiable"):
        raise RuntimeError(
            f"differentiable{where}: autograd cannot follow FusedAdam's step; use torch.optim.AdamW for it"
        )


def check_param(param: Tensor, name: str) -> None:
    """Raises for a (local) parameter that no kernel updates."""
    if is_lazy(param):
        raise ValueError(f"{name}: it is not initialized, so that its shape is not known; run the model once before")
    if param.is_complex():
        raise ValueError(f"{name}: complex parameters ({param.dtype}) are not supported; give torch.view_as_real of it")
    if param.layout is not torch.strided:
        raise ValueError(f"{name}: layout {param.layout} is not supported; use a dense parameter")
    if param.is_neg():
        raise ValueError(f"{name}: a lazily negated view cannot be updated; give resolve_neg() of it")
    if param.dtype not in PARAM_DTYPES:
        raise ValueError(f"{name}: parameters of {param.dtype} are not supported; use {_join(PARAM_DTYPES)}")


def check_grad_dtype(grad: Tensor, name: str) -> None:
    """Raises for gradients that no kernel reads."""
    if grad.dtype not in GRAD_DTYPES:
        raise ValueError(f"{name}: gradients of {grad.dtype} are not supported; use {_join(GRAD_DTYPES)}")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    try:
        return hasattr(value, "__float__") and isinstance(float(value), float)
    except (TypeError, ValueError, OverflowError):
        return False


def _is_flag(value: Any) -> bool:
    """Of a string, and of anything that holds others, it is not known what is meant."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return value is None or (hasattr(value, "__bool__") and not hasattr(value, "__len__"))


def _is_left_unread(value: Any) -> bool:
    """Whether reading a number would make the host wait for a device, or there is nothing to read."""
    return isinstance(value, Tensor) and (value.device.type != "cpu" or is_fake(value))


def _finite_from_zero(value: Any) -> bool:
    if not _is_number(value):
        return False
    number = as_number(value)
    return math.isfinite(number) and number >= 0.0


def _join(dtypes: tuple[torch.dtype, ...]) -> str:
    names = [str(dtype) for dtype in dtypes]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


def name_in(group: dict[str, Any], number: int, i: int) -> str:
    """What errors call parameter `i` of that group, the optimizer's group `number`."""
    names = group.get("param_names")
    return f"'{names[i]}'" if names else f"parameter {i} of group {number}"


def names_of(groups: Sequence[dict[str, Any]]) -> dict[int, str]:
    """What errors call each parameter of an optimizer's groups, by id."""
    found: dict[int, str] = {}
    for number, group in enumerate(groups):
        for i, param in enumerate(group["params"]):
            found.setdefault(id(param), name_in(group, number, i))
    return found
