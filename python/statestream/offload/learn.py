"""What state an optimizer keeps: learnt from one step of a twin with one parameter, on the meta device."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statestream.tensors import local_of

__all__ = ["StateKind", "is_host_scalar", "learn_state", "unhooked_step"]


@dataclass(frozen=True)
class StateKind:
    """One state tensor of one parameter, by its local shape."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


def is_host_scalar(value: Any, device: torch.device) -> bool:
    """Whether a state is kept on the host by the optimizer itself (a step count, say): then it stays there."""
    if not isinstance(value, Tensor):
        return True
    return value.device.type == "cpu" and (device.type != "cpu" or value.dim() == 0)


def learn_state(
    inner: torch.optim.Optimizer,
    group: dict[str, Any],
    shape: tuple[int, ...],
    param: Tensor,
    state: Mapping[str, Any],
) -> list[StateKind]:
    """The state tensors that one step makes on the device for a parameter like `param`, with this local shape.

    What its `state` holds already is taken for granted: some optimizers make it in their constructor. The step is the
    optimizer's own, without its hooks, on a meta tensor. An optimizer whose kernels have no meta form runs it on zeros
    of that shape on the parameter's device.
    """
    device = local_of(param).device
    meta_error: Exception | None = None
    if not group.get("fused"):  # torch's fused kernels have no meta form, and keep their counts on the device
        try:
            return _learn_on(torch.device("meta"), inner, group, shape, param, state)
        except Exception as error:
            meta_error = error
    try:
        return _learn_on(device, inner, group, shape, param, state)
    except Exception as error:
        raise ValueError(
            f"the state of {type(inner).__name__} could not be learnt from a step of its own on one parameter of shape "
            f"{shape} ({meta_error or error}); pass elementwise=False to move all of its state in one pass"
        ) from error


def _learn_on(
    device: torch.device,
    inner: torch.optim.Optimizer,
    group: dict[str, Any],
    shape: tuple[int, ...],
    param: Tensor,
    held: Mapping[str, Any],
) -> list[StateKind]:
    like = torch.nn.Parameter(torch.zeros(shape, dtype=param.dtype, device=device))
    like.grad = torch.zeros_like(like)
    twin = object.__new__(type(inner))
    twin.__dict__.update(inner.__dict__)
    options = {k: _own(v, device) for k, v in group.items() if k != "params"}
    if device.type == "meta":
        options.update({k: False for k in ("foreach", "fused") if k in options})
    if "param_names" in options:
        options["param_names"] = options["param_names"][:1]
    state = defaultdict(dict)
    if held:
        state[like] = {k: _like_state(v, param, like) for k, v in held.items()}
    twin.__dict__.update(state=state, param_groups=[{**options, "params": [like]}])
    with torch.no_grad():
        unhooked_step(twin)()
    kinds = []
    for name, value in twin.state.get(like, {}).items():
        if not is_host_scalar(value, device):
            kinds.append(StateKind(name, tuple(value.shape), value.dtype))
    return kinds


def _like_state(value: Any, param: Tensor, like: Tensor) -> Any:
    """What stands for a state of `param` in the state of its twin."""
    if is_host_scalar(value, local_of(param).device):
        return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    local = local_of(value)
    shape = like.shape if local.shape == local_of(param).shape else local.shape
    return torch.zeros(shape, dtype=local.dtype, device=like.device)


def _own(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if value.device.type == "cpu" or device.type != "meta" else value.item()
    return copy.deepcopy(value)


def unhooked_step(inner: torch.optim.Optimizer) -> Callable[[], Any]:
    """The class's step without the wrapper in which torch.optim.Optimizer runs step hooks."""
    step = type(inner).step
    while (
        getattr(step, "hooked", False) and getattr(step, "__globals__", {}).get("__name__") == "torch.optim.optimizer"
    ):
        step = step.__wrapped__
    return lambda: step(inner)
