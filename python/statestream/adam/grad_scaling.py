"""Gradient scaling and skipped steps, and the scalars that a capturable step leaves on the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from statestream import kernels
from statestream.arguments import as_numbers
from statestream.kernels import AdamOptions, DeviceScalars
from statestream.state.state_format import STEP
from statestream.tensors.local import is_fake, local_of
from statestream.tensors.sharding import as_dtensor_like

__all__ = [
    "StepNumbers",
    "count_on_device",
    "device_of_scalar",
    "device_scalars",
    "is_skipped",
    "needs_scaled_gradients",
    "numbers_of",
    "scaling_of",
    "unscale_gradients",
]


def needs_scaled_gradients(params: Iterable[Tensor]) -> bool:
    """Whether GradScaler cannot unscale the gradients: it refuses FP16 ones. Before there are any, those to come have
    their parameters' dtypes."""
    params = list(params)
    grads = [param.grad for param in params if param.grad is not None]
    return any(t.dtype is torch.float16 for t in grads or [param for param in params if param.requires_grad])


def scaling_of(optimizer: torch.optim.Optimizer, scaler: Any) -> tuple[Tensor | None, Tensor | None]:
    """What divides the gradients, and a tensor that is not zero where the step is to be skipped.

    By torch's convention, where GradScaler sets both on the optimizer, or by Transformer Engine's, where the
    scaler is handed to step().
    """
    if scaler is None:
        found_inf = getattr(optimizer, "found_inf", None)
        if not isinstance(found_inf, (Tensor, NoneType)):  # the sum of no tensors, where GradScaler saw no gradient
            found_inf = torch.tensor(float(found_inf), dtype=torch.float32, device="cpu")
        return getattr(optimizer, "grad_scale", None), found_inf
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:
        found, scale = scaler._found_inf_per_device(optimizer), None
    else:
        found, scale = scaler._check_inf_per_device(optimizer), scaler._get_scale_async()
    per_device = list(found.values())
    return scale, sum(t.to(per_device[0].device) for t in per_device) if per_device else None


@dataclass(frozen=True)
class StepNumbers:
    """What the host has to know of one step: all of it is read at once, before anything is launched."""

    skipped: bool
    """Whether found_inf is not zero."""
    grad_scale: float
    options: list[AdamOptions]
    """Of each group."""
    scaling: tuple[Tensor | None, Tensor | None]
    """grad_scale and found_inf as they came. A capturable step reads them on the device."""


def numbers_of(
    groups: list[dict[str, Any]],
    *,
    grad_scale: float | Tensor | None,
    found_inf: float | Tensor | None,
    capturable: bool = False,
) -> StepNumbers:
    """Reads the settings of these groups, and the scaling. Of a `capturable` step kernels read lr and scaling on the
    device, and the host does not."""
    values = [0.0 if found_inf is None else found_inf, 1.0 if grad_scale is None else grad_scale]
    if capturable:
        values = [0.0, 1.0]
    for group in groups:
        beta1, beta2 = group["betas"]
        values += [0.0 if capturable else group["lr"], beta1, beta2, group["eps"], group["weight_decay"]]
    skip, scale, *numbers = as_numbers(values)
    options = [
        AdamOptions(
            *numbers[5 * i : 5 * i + 5],
            decoupled=bool(group["decoupled_weight_decay"]),
            bias_correction=bool(group["bias_correction"]),
            maximize=bool(group["maximize"]),
        )
        for i, group in enumerate(groups)
    ]
    return StepNumbers(bool(skip), scale, options, (grad_scale, found_inf))


def is_skipped(found_inf: float | Tensor | None) -> bool:
    """Whether the step of another optimizer is to be skipped. It reads its settings, and grad_scale, itself."""
    return numbers_of([], grad_scale=None, found_inf=found_inf).skipped


def unscale_gradients(
    params: Iterable[Tensor], grad_name: str, grad_scale: float | Tensor, found_inf: Tensor | None = None
) -> None:
    """Divides the gradients by `grad_scale`, in place and each once, with the arithmetic of GradScaler's ``unscale_``.
    Where `found_inf` is not zero they stay as they are; the host does not read it."""
    if not isinstance(grad_scale, Tensor):
        grad_scale = torch.tensor(grad_scale, dtype=torch.float64, device="cpu")
    inverse = grad_scale.reshape(()).double().reciprocal().float()
    if found_inf is not None:
        inverse.masked_fill_(found_inf.to(inverse.device).reshape(()) != 0, 1.0)
    holders = {id(grad): (param, grad) for param in params if (grad := getattr(param, grad_name, None)) is not None}
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param, grad in holders.values():
        local = local_of(grad)
        if is_fake(local):
            continue
        if not _can_be_written(local):
            local = local.clone(memory_format=torch.contiguous_format).resolve_neg()
            setattr(param, grad_name, as_dtensor_like(local, grad))
        alike.setdefault((local.device, local.dtype), []).append(local)
    for (device, _), locals in alike.items():
        found = torch.zeros((), dtype=torch.float32, device=device)  # the operation reports here; it was asked before
        torch._amp_foreach_non_finite_check_and_unscale_(locals, found, inverse.to(device))


def _can_be_written(tensor: Tensor) -> bool:
    """Whether an operation in place works: not where elements share memory, or are negated lazily."""
    shares = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    frozen = tensor.is_inference() and not torch.is_inference_mode_enabled()
    return not (shares or frozen or tensor.is_neg())


def device_of_scalar(group: dict[str, Any], value: float | Tensor, found_inf: Tensor | None = None) -> torch.device:
    """Where a capturable group's lr or count, now `value`, has to be: on the device of its first trained parameter that
    has data. Beside any other one it stays where it is. Where there is none it follows `found_inf`, which the host
    would have to read otherwise."""
    at = value.device if isinstance(value, Tensor) else None
    there = (local_of(param).device for param in group["params"] if param.requires_grad)
    with_data = (device for device in there if device.type != "meta")
    home = next(with_data, None)
    if home is None:
        home = at if found_inf is None else found_inf.device
        return torch.device("cpu") if home is None else home
    return at if at is not None and at != home and at in with_data else home


def device_scalars(
    group: dict[str, Any], devices: Iterable[torch.device], grad_scale: Tensor | None, found_inf: Tensor | None
) -> dict[torch.device, DeviceScalars]:
    """What capturable calls read on each of these devices when they run. lr stays at its address, which a CUDA graph
    holds, unless the parameters have moved to another device or the group was given another lr; on other devices than
    its own there is a copy."""
    group["lr"] = _as_scalar(group["lr"], device_of_scalar(group, group["lr"]))
    return {
        device: DeviceScalars(*(_there(scalar, device) for scalar in (group["lr"], grad_scale, found_inf)))
        for device in devices
    }


def count_on_device(group: dict[str, Any], found_inf: Tensor | None) -> None:
    """Counts a capturable group's call, unless found_inf, without the host reading either."""
    device = device_of_scalar(group, group[STEP], found_inf)
    group[STEP] = _as_scalar(group[STEP], device)
    kernels.advance_steps(device, [group[STEP]], _there(found_inf, device))


def _as_scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """`value` itself where a kernel can read it."""
    return torch.as_tensor(value, dtype=torch.float32, device=device)


def _there(scalar: Tensor | None, device: torch.device) -> Tensor | None:
    return None if scalar is None else scalar.to(device=device, dtype=torch.float32)
