"""State to FP32 in host memory, as DTensors on the parameter's own mesh, in bounded device memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from statestream.checkpoint.pinned import host_tensors
from statestream.checkpoint.transfer import Exporter
from statestream.state.stored import Stored
from statestream.tensors.local import is_dense, is_fake, local_of
from statestream.tensors.sharding import as_dtensor_like

__all__ = ["export_on_device", "export_to_host", "taken_by_export"]


def export_on_device(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each state as FP32 on its own device: what is FP32 already is the live tensor itself, as it is in
    Transformer Engine's export; but a copy of a master of which the next step would make another. Device memory: 4
    bytes an element of every state that is not FP32, or copied."""
    return [
        {name: _on_device(value) if isinstance(value, Stored) else value for name, value in state.items()}
        for state in states
    ]


def _on_device(state: Stored) -> Tensor:
    return state.tensor if state.is_as_exported else as_dtensor_like(state.decoded(), state.tensor)


def export_to_host(states: list[dict[str, Any]], staging_bytes: int) -> tuple[list[dict[str, Any]], int]:
    """A snapshot of each state in host memory (pinned where the state is on a GPU), values FP32; and the bytes of
    device memory that its staging took.

    A DTensor comes back as a DTensor on the same mesh, with the same placements, shape and stride, and a
    local tensor in host memory. What a user keeps there besides is copied as it is. Device memory: `staging_bytes`,
    freed on return, however large the state.
    """
    entries = [v for state in states for v in state.values() if _is_streamed(v)]
    dtypes = [entry.exported if isinstance(entry, Stored) else entry.dtype for entry in entries]
    hosts = iter(_host_tensors([_stored(entry).local for entry in entries], dtypes))
    exported = []
    with Exporter(staging_bytes) as exporter:
        for state in states:
            copies: dict[str, Any] = {}
            for name, value in state.items():
                if _is_streamed(value):
                    stored, host = _stored(value), next(hosts)
                    exporter.copy(stored, host)
                    copies[name] = as_dtensor_like(host, stored.tensor)
                else:
                    copies[name] = _copied(value)
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


def _is_streamed(value: Any) -> bool:
    """A user's tensor may have holes, or no strides at all, which no plain copy of memory takes."""
    if isinstance(value, Stored):
        return True
    return isinstance(value, Tensor) and value.layout is torch.strided and is_dense(local_of(value))


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    local = local_of(value).detach()
    return as_dtensor_like(local.to("cpu") if local.device.type != "cpu" else local.clone(), value)


def _stored(value: Stored | Tensor) -> Stored:
    return value if isinstance(value, Stored) else Stored(value)


def _host_tensors(states: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    """A host tensor for each local state: pinned where the state is on a GPU that is there."""
    on_gpu = [i for i, state in enumerate(states) if state.device.type == "cuda" and not is_fake(state)]
    pinned = dict(zip(on_gpu, host_tensors([states[i] for i in on_gpu], [dtypes[i] for i in on_gpu]), strict=True))
    return [
        pinned[i] if i in pinned else torch.empty_like(state, dtype=dtype, device="cpu")
        for i, (state, dtype) in enumerate(zip(states, dtypes, strict=True))
    ]
