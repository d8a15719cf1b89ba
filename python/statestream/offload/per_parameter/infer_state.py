"""What state an optimizer keeps: learnt from one step of a twin with one parameter, on the meta device."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from statestream.device.guards import on_device
from statestream.offload.per_parameter.counts import own_copy
from statestream.tensors.local import local_of

__all__ = ["StateKind", "check_plain", "infer_state", "is_host_scalar", "unhooked", "unhooked_step"]


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


def check_plain(value: Any, name: Any, label: str) -> None:
    """ValueError for state in a tensor of a class of its own, as 8-bit optimizers keep it: memory that is moved by
    itself would hold numbers of another kind."""
    local = local_of(value) if isinstance(value, Tensor) else value
    cls = type(local)
    wraps = isinstance(local, Tensor) and cls.__torch_dispatch__ is not Tensor.__torch_dispatch__
    if wraps and not cls.__module__.startswith("torch."):
        raise ValueError(
            f"state {name!r} of {label} is a tensor of class {cls.__name__}, which is not kept in host memory; use an "
            "optimizer with plain tensors, such as FusedAdam with exp_avg_dtype and exp_avg_sq_dtype"
        )


def infer_state(
    inner: torch.optim.Optimizer,
    group: dict[str, Any],
    shape: tuple[int, ...],
    param: Tensor,
    state: Mapping[str, Any],
    label: str,
) -> list[StateKind]:
    """The state tensors that one step makes on the device for a parameter like `param`, with this local shape.

    What its `state` holds already is taken for granted: some optimizers make it in their constructor. The step is the
    optimizer's own, without its hooks, on a meta tensor. An optimizer whose kernels have no meta form runs it on zeros
    of that shape on the parameter's device.
    """
    device = local_of(param).device
    # torch's fused kernels have no meta form, and keep their counts on the device.
    places = [device] if group.get("fused") else [torch.device("meta"), device]
    errors: list[Exception] = []
    for place in places:
        try:
            made = _learn_on(place, inner, group, shape, param, state)
        except Exception as error:
            errors.append(error)
            continue
        errors.clear()  # their tracebacks hold this frame, which would hold them
        for name, value in made.items():
            check_plain(value, name, label)
        kept = {name: value for name, value in made.items() if not is_host_scalar(value, place)}
        return [StateKind(name, tuple(value.shape), value.dtype) for name, value in kept.items()]
    try:
        raise ValueError(
            f"the state of {type(inner).__name__} could not be learnt from a step of its own on one parameter of shape "
            f"{shape} ({errors[0]}); pass per_parameter=False to move all of its state in one pass"
        ) from errors[-1]
    finally:
        errors.clear()


def _learn_on(
    device: torch.device,
    inner: torch.optim.Optimizer,
    group: dict[str, Any],
    shape: tuple[int, ...],
    param: Tensor,
    held: Mapping[str, Any],
) -> dict[str, Any]:
    """The state that a step makes for a twin of `param`; the optimizer and what it keeps stay as they are."""
    like = torch.nn.Parameter(torch.zeros(shape, dtype=param.dtype, device=device))
    like.grad = torch.zeros_like(like)
    options = {k: _own(v, device) for k, v in group.items() if k != "params"}
    if device.type == "meta":
        options.update({k: False for k in ("foreach", "fused") if k in options})
    if "param_names" in options:
        options["param_names"] = options["param_names"][:1]
    twins = {**options, "params": [like]}
    state: dict[Any, Any] = defaultdict(dict)
    instead = {id(p): p for g in inner.param_groups for p in g["params"]}
    instead |= {id(inner.state): state, id(inner.param_groups): [twins], id(group): twins, id(param): like}
    state.update({k: own_copy(v, instead) for k, v in inner.state.items() if not isinstance(k, Tensor)})
    if held:
        state[like] = {k: _like_state(v, param, like) for k, v in held.items()}
    twin = object.__new__(type(inner))
    twin.__dict__.update(own_copy(vars(inner), instead))
    # A step that calls the one of its base class, which torch has wrapped, runs the hooks there.
    twin.__dict__.update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    # On the meta device too torch's optimizers ask the current device for its stream, which opens a context there.
    with torch.no_grad(), on_device(local_of(param).device):
        unhooked_step(twin)()
    return twin.state.get(like, {})


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
    step = unhooked(type(inner).step)
    return lambda: step(inner)


def unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """A class's step without that wrapper."""
    while (
        getattr(step, "hooked", False) and getattr(step, "__globals__", {}).get("__name__") == "torch.optim.optimizer"
    ):
        step = step.__wrapped__
    return step
