"""What step() asks of the kernels: parameters with gradients, as rows that share a kernel call.

Everything is checked while the rows are gathered, before any kernel runs, so a refused step changes
nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from statestream import kernels
from statestream.arguments import check_param
from statestream.kernels import Formats
from statestream.moments import MASTER, STEP, StateFormat
from statestream.tensors import copy_version, is_dense, local_of, same_layout

__all__ = ["Call", "StepTable"]


@dataclass
class Call:
    """One kernel call: rows on one device with the same formats."""

    device: torch.device
    formats: Formats
    rows: array = field(default_factory=lambda: array("q"))
    params: list[Tensor] = field(default_factory=list)
    keep: list[Tensor] = field(default_factory=list)
    """Gradients copied into the parameter's layout, alive until the kernel has run."""


@dataclass
class _Seen:
    """A parameter as the last step left it."""

    param: Tensor
    address: int
    version: int | None
    local_version: int | None


class StepTable:
    """Gathers calls, and remembers what each parameter looked like after the last step.

    A parameter with an FP32 master that was written since (a loaded model, an edit under no_grad) is
    brought back together with its master first: where they no longer round to each other, the parameter
    wins.
    """

    def __init__(self, form: StateFormat):
        self.form = form
        self._seen: dict[int, _Seen] = {}

    def calls(
        self,
        params: list[Tensor],
        state: dict[Tensor, dict[str, Any]],
        grad_of: Callable[[Tensor], Tensor | None],
        name_of: Callable[[int], str],
    ) -> list[Call]:
        """The kernel calls that update `params`, without running them.

        Parameters whose gradient is None are left out. Each is taken once, however often it is listed.
        """
        calls: dict[tuple[torch.device, Formats], Call] = {}
        refresh: list[tuple[Tensor, Tensor]] = []
        taken: set[int] = set()
        device: torch.device | None = None
        for i, param in enumerate(params):
            grad = grad_of(param)
            if grad is None or id(param) in taken:
                continue
            taken.add(id(param))
            local = local_of(param)
            if device is None:
                device = local.device
            elif local.device != device:
                raise ValueError(
                    f"{name_of(i)} is on {local.device}, others of its group on {device}; "
                    "give the parameters of each device a group of their own"
                )
            check_param(local, name_of(i))
            grad = self._checked_grad(param, local, grad, name_of(i))
            tensors = state[param]
            self.form.follow(param, tensors)
            exp_avg, exp_avg_sq = local_of(tensors["exp_avg"]), local_of(tensors["exp_avg_sq"])
            master = tensors.get(MASTER)
            if master is not None:
                master = local_of(master)
                if master.dtype is torch.float32 and self._was_written(param, local):
                    refresh.append((local, master))
            formats = Formats(
                kernels.format_of(local),
                kernels.format_of(grad),
                kernels.format_of(exp_avg),
                kernels.format_of(exp_avg_sq),
                kernels.NONE if master is None else kernels.format_of(master),
            )
            call = calls.get((device, formats))
            if call is None:
                call = calls[device, formats] = Call(device, formats)
            call.rows.extend(kernels.row(local, grad, exp_avg, exp_avg_sq, master, tensors[STEP]))
            call.params.append(param)
            call.keep.append(grad)
        for local, master in refresh:
            kernels.refresh_master(local, master)
        return list(calls.values())

    def updated(self, params: list[Tensor]) -> None:
        """Says that kernels wrote these: autograd is told, and the next step knows them."""
        written = []
        for param in params:
            local = local_of(param)
            written.extend(t for t in ((param,) if local is param else (param, local)) if not t.is_inference())
        if written:
            torch.autograd.graph.increment_version(written)
        for param in params:
            self.remember(param)

    def remember(self, param: Tensor) -> None:
        local = local_of(param)
        self._seen[id(param)] = _Seen(param, local.data_ptr(), copy_version(param), copy_version(local))

    def forget(self, param: Tensor | None = None) -> None:
        """The next step compares the parameter (or every one) with its master."""
        if param is None:
            self._seen.clear()
        else:
            self._seen.pop(id(param), None)

    def _was_written(self, param: Tensor, local: Tensor) -> bool:
        seen = self._seen.get(id(param))
        return (
            seen is None
            or seen.param is not param
            or seen.version is None
            or seen.address != local.data_ptr()
            or seen.version != copy_version(param)
            or seen.local_version != copy_version(local)
        )

    @staticmethod
    def _checked_grad(param: Tensor, local: Tensor, grad: Tensor, name: str) -> Tensor:
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"{name}: FusedAdam does not support sparse gradients ({grad.layout}); use torch.optim.SparseAdam"
            )
        if not is_dense(local):
            raise ValueError(
                f"{name}: strides {local.stride()} of shape {tuple(local.shape)} leave gaps or overlap; "
                "make the parameter contiguous"
            )
        if grad.shape != param.shape:
            raise ValueError(f"{name}: gradient of shape {tuple(grad.shape)}, parameter of {tuple(param.shape)}")
        grad = local_of(grad)
        if grad.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"{name}: gradients of {grad.dtype} are not supported; use torch.float32 or torch.bfloat16"
            )
        if grad.device != local.device or grad.shape != local.shape:
            raise ValueError(
                f"{name}: local gradient {tuple(grad.shape)} on {grad.device}, local parameter "
                f"{tuple(local.shape)} on {local.device}"
            )
        if same_layout(grad, local):
            return grad
        return torch.empty_like(local, dtype=grad.dtype).copy_(grad)
