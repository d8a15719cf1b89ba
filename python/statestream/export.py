"""State to FP32 in host memory, as DTensors on the parameter's own mesh, in bounded device memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from statestream import kernels
from statestream.moments import STEP, StateFormat
from statestream.pinned import host_tensors
from statestream.sharding import around
from statestream.tensors import flat, is_fake, local_of
from statestream.transfer import Exporter

__all__ = ["export_on_device", "export_to_host", "taken_by_export", "unscaled"]


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
    local = local_of(state)
    out = torch.empty_like(local, dtype=torch.float32)
    if local.numel():
        kernels.decode(flat(local), flat(out))
    return around(out, state)


def export_to_host(
    states: list[dict[str, Any]], form: StateFormat, staging_bytes: int
) -> tuple[list[dict[str, Any]], int]:
    """A snapshot of each state in host memory (pinned where the state is on a GPU), values FP32; and the bytes of
    device memory that its staging took.

    A DTensor comes back as a DTensor on the same mesh, with the same placements, shape and stride, and a
    local tensor in host memory. Device memory: `staging_bytes`, freed on return, however large the state.
    """
    entries = [
        (value, value.dtype if name == STEP else form.exported_dtype(value.dtype))
        for state in states
        for name, value in state.items()
        if isinstance(value, Tensor)
    ]
    hosts = iter(_host_tensors([local_of(value) for value, _ in entries], [dtype for _, dtype in entries]))
    exported = []
    with Exporter(staging_bytes) as exporter:
        for state in states:
            copies: dict[str, Any] = {}
            for name, value in state.items():
                if isinstance(value, Tensor):
                    host = next(hosts)
                    exporter.copy(local_of(value), host)
                    value = around(host, value)
                copies[name] = value
            exported.append(copies)
        staging = exporter.staging_taken
    return exported, staging


def taken_by_export(states: list[dict[str, Any]], exported: list[dict[str, Any]], staging: int) -> tuple[int, int]:
    """Bytes on the device and on the host that an export took: staging, and what is not live state itself."""
    device, host = staging, 0
    for live, copies in zip(states, exported, strict=True):
        for name, value in copies.items():
            if isinstance(value, Tensor) and value is not live[name]:
                local = local_of(value)
                nbytes = local.numel() * local.element_size()
                device, host = (device, host + nbytes) if local.device.type == "cpu" else (device + nbytes, host)
    return device, host


def _host_tensors(states: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    """A host tensor for each local state: pinned where the state is on a GPU that is there."""
    on_gpu = [i for i, state in enumerate(states) if state.device.type == "cuda" and not is_fake(state)]
    pinned = dict(zip(on_gpu, host_tensors([states[i] for i in on_gpu], [dtypes[i] for i in on_gpu]), strict=True))
    return [
        pinned[i] if i in pinned else torch.empty_like(state, dtype=dtype, device="cpu")
        for i, (state, dtype) in enumerate(zip(states, dtypes, strict=True))
    ]
