"""Gradient scaling and skipped steps, and the scalars that a capturable step leaves on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from statestream import kernels
from statestream.kernels import DeviceScalars
from statestream.moments import STEP
from statestream.tensors import local_of

__all__ = ["count_on_device", "device_scalars", "scaling_of"]


def scaling_of(optimizer: torch.optim.Optimizer, scaler: Any) -> tuple[Tensor | None, Tensor | None]:
    """What divides the gradients, and a tensor that is not zero where the step is to be skipped.

    By torch's convention, where GradScaler sets both on the optimizer, or by Transformer Engine's, where the
    scaler is handed to step().
    """
    if scaler is None:
        return getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:
        found, scale = scaler._found_inf_per_device(optimizer), None
    else:
        found, scale = scaler._check_inf_per_device(optimizer), scaler._get_scale_async()
    per_device = list(found.values())
    return scale, sum(t.to(per_device[0].device) for t in per_device) if per_device else None


def device_scalars(
    group: dict[str, Any], device: torch.device, grad_scale: Tensor | None, found_inf: Tensor | None
) -> DeviceScalars:
    """What a capturable call reads when it runs. lr stays at its address, which a CUDA graph holds, unless the
    parameters have moved to another device or the group was given another lr."""
    group["lr"] = _as_scalar(group["lr"], device)
    return DeviceScalars(group["lr"], _there(grad_scale, device), _there(found_inf, device))


def count_on_device(group: dict[str, Any], found_inf: Tensor | None) -> None:
    """Counts a capturable group's call, unless found_inf, without the host reading either."""
    if group["params"]:
        device = local_of(group["params"][0]).device
    else:
        known = next((t for t in (found_inf, group[STEP]) if isinstance(t, Tensor)), None)
        device = torch.device("cpu") if known is None else known.device
    group[STEP] = _as_scalar(group[STEP], device)
    kernels.advance_steps(device, [group[STEP]], _there(found_inf, device))


def _as_scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """`value` itself where a kernel can read it."""
    return torch.as_tensor(value, dtype=torch.float32, device=device)


def _there(scalar: Tensor | None, device: torch.device) -> Tensor | None:
    return None if scalar is None else scalar.to(device=device, dtype=torch.float32)
