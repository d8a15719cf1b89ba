"""What cannot be captured in a CUDA graph says so before anything runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["check_settings_on_device", "is_capturing", "refuse_capture"]


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream. To ask a device opens a context there: one that has
    none is not asked."""
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # a torch without CUDA has no such function
    if has_context is None or not torch.cuda.is_initialized() or not has_context(torch.cuda.current_device()):
        return False
    return torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str, why: str) -> None:
    """RuntimeError while a CUDA graph is being captured."""
    if is_capturing():
        raise RuntimeError(f"{what} cannot be captured in a CUDA graph: {why}")


def check_settings_on_device(groups: list[dict[str, Any]]) -> None:
    """RuntimeError for settings that a captured step would have to read from the device, or to bring there."""
    for number, group in enumerate(groups):
        if not isinstance(group["lr"], Tensor):
            raise RuntimeError(
                f"lr of group {number}: {group['lr']!r} is a number, which a CUDA graph would keep; write into the "
                "tensor that capturable=True has made, with group['lr'].fill_(...)"
            )
        for name in ("betas", "eps", "weight_decay"):
            values = group[name] if isinstance(group[name], (tuple, list)) else [group[name]]
            for value in values:
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    raise RuntimeError(
                        f"{name} of group {number}: a tensor on {value.device} cannot be read while a CUDA graph is "
                        "captured; give a number"
                    )
