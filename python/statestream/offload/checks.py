"""What CPUOffloadOptimizer refuses at the door, by name, before anything is changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from statestream.adam.fused_adam import FusedAdam
from statestream.offload.muon.variants import muon_layout
from statestream.offload.per_parameter.infer_state import unhooked
from statestream.state.lazy_state import peek
from statestream.tensors.local import is_dtensor, local_of
from statestream.tensors.quantized import is_quantized

__all__ = [
    "ELEMENTWISE",
    "check_gradients",
    "check_groups",
    "check_optimizer",
    "check_share",
    "check_step",
    "device_of",
]

ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
)
"""Of torch's optimizers those whose update of an element depends on nothing but that element's history."""

_BY_PARAMETER = frozenset({torch.optim.Adafactor})
"""Those whose update of a parameter depends on that whole parameter alone: known where no rank has a part of it."""

REPLACED = ("step", "refresh_masters", "memory_report")
"""Of FusedAdam what is done otherwise while its state is in host memory."""


def check_optimizer(optimizer: Any, step_chunk_bytes: int | None, per_parameter: bool | None) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: {type(optimizer).__name__} is not a torch.optim.Optimizer")
    if step_chunk_bytes is not None and (isinstance(step_chunk_bytes, bool) or not isinstance(step_chunk_bytes, int)):
        raise TypeError(f"step_chunk_bytes: {step_chunk_bytes!r} is not a number of bytes")
    if step_chunk_bytes is not None and step_chunk_bytes < 1:
        raise ValueError(f"step_chunk_bytes: {step_chunk_bytes} is not valid; give a positive number of bytes, or None")
    if per_parameter is not None and not isinstance(per_parameter, bool):
        raise TypeError(f"per_parameter: {per_parameter!r} is not valid; give True, False or None")
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates its closure in the middle of a step; its state cannot be offloaded")
    known = isinstance(optimizer, FusedAdam) or type(optimizer) in ELEMENTWISE or muon_layout(optimizer) is not None
    if type(optimizer) in _BY_PARAMETER:
        known = not any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"])
    if per_parameter is None and not known:
        raise ValueError(
            f"{name}: it is not known whether each parameter's update depends on that parameter alone; pass "
            "per_parameter=True if it does, or per_parameter=False to move all of its state in one pass"
        )
    if per_parameter is False and step_chunk_bytes is not None:
        raise ValueError(f"{name}: per_parameter=False moves all state in one pass; step_chunk_bytes must be None")
    check_methods(optimizer)
    check_step(optimizer)
    check_groups(optimizer, optimizer.param_groups)
    device_of(optimizer)


def check_methods(optimizer: torch.optim.Optimizer) -> None:
    """ValueError for a subclass of FusedAdam whose own methods streaming would leave out."""
    if not isinstance(optimizer, FusedAdam):
        return
    cls = type(optimizer)
    own = [name for name in REPLACED if unhooked(getattr(cls, name)) is not unhooked(getattr(FusedAdam, name))]
    if own:
        raise ValueError(
            f"{cls.__name__} overrides {', '.join(own)} of FusedAdam, which CPUOffloadOptimizer does itself: what it "
            "adds would be left out. Put it in hooks (register_step_pre_hook, register_step_post_hook), or in a "
            "subclass of CPUOffloadOptimizer"
        )


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """ValueError where `step` was set on the object to something that does more than the class's own, which would be
    left out. What a scheduler puts there only notes that it was called."""
    patched = step = vars(optimizer).get("step")
    if step is None:
        return
    own = unhooked(type(optimizer).step)
    while getattr(step, "_wrapped_by_lr_sched", False):
        step = step.__wrapped__
    if unhooked(getattr(step, "__func__", step)) is not own:
        found = getattr(patched, "__qualname__", type(patched).__name__)
        raise ValueError(
            f"step of this {type(optimizer).__name__} was replaced on the object, by {found}: CPUOffloadOptimizer "
            "would leave that out. Delete it there, and put it on the CPUOffloadOptimizer, or in step hooks"
        )


def check_share(optimizer: Any, cpu_fraction: Any, cpu_threads: Any) -> None:
    is_number = isinstance(cpu_fraction, (int, float)) and not isinstance(cpu_fraction, bool)
    if cpu_fraction != "auto" and not (is_number and 0.0 <= cpu_fraction <= 1.0):
        raise ValueError(f'cpu_fraction: {cpu_fraction!r} is not valid; give a number from 0 to 1, or "auto"')
    if cpu_fraction and not isinstance(optimizer, FusedAdam):
        raise ValueError(
            f"cpu_fraction: {cpu_fraction!r} is for FusedAdam, whose update the CPU makes with the same bits; a "
            f"{type(optimizer).__name__} is streamed as a whole, with cpu_fraction=0"
        )
    if cpu_threads is None:
        return
    if isinstance(cpu_threads, bool) or not isinstance(cpu_threads, int) or not 1 <= cpu_threads <= 4096:
        raise ValueError(f"cpu_threads: {cpu_threads!r} is not valid; give a number of threads from 1 to 4096, or None")


def check_gradients(optimizer: Any, offload_gradients: Any) -> None:
    if not isinstance(offload_gradients, bool):
        raise ValueError(f"offload_gradients: {offload_gradients!r} is not valid; give True or False")
    if not offload_gradients:
        return
    if not isinstance(optimizer, FusedAdam):
        raise ValueError(
            f"offload_gradients: it is for FusedAdam, which steps with FP32 gradients whatever the parameters are; a "
            f"{type(optimizer).__name__} reads them where backward leaves them"
        )
    if optimizer.use_decoupled_grad:
        raise ValueError(
            "offload_gradients: it takes `grad` in backward, and use_decoupled_grad=True steps with `decoupled_grad`; "
            "choose one of the two"
        )


def check_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    for number, group in enumerate(groups):
        for option in ("capturable", "differentiable"):
            if group.get(option):
                raise ValueError(
                    f"{type(optimizer).__name__}: {option}=True (group {number}) does not go with state in host "
                    f"memory; build it with {option}=False"
                )
        for i, param in enumerate(group["params"]):
            if param.requires_grad:
                check_streamed(local_of(param), f"parameter {i} of group {number}")


def check_streamed(local: Tensor, name: str) -> None:
    """ValueError for a (local) parameter whose state cannot be streamed. A frozen one has none."""
    if is_quantized(local):
        raise ValueError(
            f"{name}: {type(local).__name__} is quantised as a whole and is not stepped in ranges; keep such "
            "parameters in an optimizer of their own, without offload"
        )


def device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Where the trained parameters are (the others, if there are none); ValueError if in several places."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    trained = {local_of(p).device for p in params if p.requires_grad or peek(optimizer.state, p)}
    real = {device for device in trained if device.type != "meta"}
    if len(real) > 1:
        raise ValueError(
            f"the parameters are on {', '.join(sorted(map(str, real)))}; use one CPUOffloadOptimizer for each device"
        )
    if not trained:
        trained = {local_of(p).device for p in params if p.device.type != "meta"}
    return next(iter(real or trained), torch.device("cpu"))
