"""State to FP32 in host memory, as DTensors on the parameter's own mesh, in bounded device memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from statestream import kernels
from statestream.moments import STEP, StateFormat
from statestream.tensors import flat, is_dtensor, is_fake, local_of
from statestream.transfer import Exporter

__all__ = ["export_on_device", "export_to_host", "unscaled"]


def export_on_device(states: list[dict[str, Any]], form: StateFormat) -> list[dict[str, Any]]:
    """Each state as FP32 on its own device: what is FP32 already is the live tensor itself, as it is in
    Transformer Engine's export. Device memory: 4 bytes an element of every state that is not FP32."""
    return [
        {name: unscaled(value, form) if name != STEP else value for name, value in state.items()} for state in states
    ]


def unscaled(state: Tensor, form: StateFormat) -> Tensor:
    """A state as its exported dtype: itself, or a new tensor on its device."""
    if not isinstance(state, Tensor) or state.dtype is form.exported_dtype(state.dtype):
        return state
    out = torch.empty_like(state, dtype=torch.float32)
    local = local_of(state)
    if local.numel():
        kernels.decode(flat(local), flat(local_of(out)))
    return out


def export_to_host(states: list[dict[str, Any]], form: StateFormat, staging_bytes: int) -> list[dict[str, Any]]:
    """A snapshot of each state in host memory (pinned where the state is on a GPU), values FP32.

    A DTensor comes back as a DTensor on the same mesh, with the same placements, shape and stride, and a
    local tensor in host memory. Device memory: `staging_bytes`, freed on return, however large the state.
    """
    exporter = Exporter(staging_bytes)
    exported = []
    try:
        for state in states:
            copies: dict[str, Any] = {}
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    copies[name] = value
                    continue
                dtype = value.dtype if name == STEP else form.exported_dtype(value.dtype)
                copies[name] = host = _host_tensor_like(value, dtype)
                exporter.copy(local_of(value), local_of(host))
            exported.append(copies)
    finally:
        exporter.finish()
    return exported


def _host_tensor_like(state: Tensor, dtype: torch.dtype) -> Tensor:
    local = local_of(state)
    # Without a GPU any pin_memory=True raises, even for no elements.
    pinned = local.device.type == "cuda" and not is_fake(local) and torch.cuda.is_available()
    if is_dtensor(state):
        # DTensor.from_local would move the local tensor back to the mesh's device; empty_like does not.
        return torch.empty_like(state, dtype=dtype, device="cpu", pin_memory=pinned)
    return torch.empty_like(local, dtype=dtype, device="cpu", pin_memory=pinned)
