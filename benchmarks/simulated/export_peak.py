"""Extra peak device bytes of each way to a checkpoint, measured on a fake CUDA world."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from statestream import FusedAdam
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from .live_bytes import LiveBytes

__all__ = ["BOUNDED", "PATHS", "Peak", "Shape", "build", "local_elements", "peaks"]


@dataclass(frozen=True)
class Shape:
    """One parameter by its local shape, the mesh that it lies on and its placements there."""

    local: tuple[int, ...]
    mesh: DeviceMesh
    placements: tuple[Placement, ...]

    @property
    def elements(self) -> int:
        """Elements of the local tensor."""
        return torch.Size(self.local).numel()


class Model(torch.nn.Module):
    """BF16 parameters of the given shapes, and nothing that computes."""

    def __init__(self, shapes: Sequence[Shape]):
        super().__init__()
        for i, shape in enumerate(shapes):
            local = torch.empty(shape.local, dtype=torch.bfloat16, device="cuda:0")
            param = DTensor.from_local(local, shape.mesh, shape.placements, run_check=False)
            self.register_parameter(f"weight{i}", torch.nn.Parameter(param))


def build(
    shapes: Sequence[Shape], staging_bytes: int, offload: bool = True, **formats: object
) -> tuple[Model, FusedAdam]:
    """A model and an optimizer with FP32 masters and BF16 moments (or other `formats`), stepped once so that all state
    is there."""
    model = Model(shapes)
    optimizer = FusedAdam(
        model.parameters(),
        **{"master_weights": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", **formats},
        state_dict_cpu_offload=offload,
        export_staging_bytes=staging_bytes,
    )
    for param in model.parameters():
        param.grad = torch.empty_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def local_elements(shapes: Sequence[Shape]) -> int:
    return sum(shape.elements for shape in shapes)


def _get(**options: bool) -> Callable[[Model, FusedAdam], Callable[[], object]]:
    def prepare(model: Model, optimizer: FusedAdam) -> Callable[[], object]:
        return lambda: get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))

    return prepare


def _set_flat(model: Model, optimizer: FusedAdam) -> Callable[[], object]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    exported = get_optimizer_state_dict(model, optimizer, options=options)
    return lambda: set_optimizer_state_dict(model, optimizer, exported, options=options)


PATHS: dict[str, Callable[[Model, FusedAdam], Callable[[], object]]] = {
    "state_dict": lambda model, optimizer: optimizer.state_dict,
    "get, nested": _get(),
    "get, nested, cpu_offload": _get(cpu_offload=True),
    "get, flat": _get(flatten_optimizer_state_dict=True),
    "get, flat, cpu_offload": _get(flatten_optimizer_state_dict=True, cpu_offload=True),
    "set, flat": _set_flat,
    "get, full": _get(full_state_dict=True, cpu_offload=True),
}
"""Each takes a model and its optimizer, prepares what is not to be measured, and returns what is."""

BOUNDED = tuple(path for path in PATHS if path != "get, full")
"""Those whose extra bytes are at most the staging budget. A full state dict has full tensors on the device by torch's
own doing."""


@dataclass(frozen=True)
class Peak:
    """Bytes of device memory over what was live before."""

    extra: int
    """At the highest."""
    kept: int
    """Afterwards, as long as the result is held."""


def peaks(
    shapes: Sequence[Shape],
    staging_bytes: int,
    offload: bool = True,
    paths: Iterable[str] = BOUNDED,
    written: bool = False,
    **formats: object,
) -> dict[str, Peak]:
    """What each path takes with the option on (`offload`) or off, of weights that were `written` since the step or not.
    To be called inside `fake_cuda_world`."""
    found = {}
    with LiveBytes() as live:
        model, optimizer = build(shapes, staging_bytes, offload, **formats)
        if written:
            for param in model.parameters():
                param.detach().zero_()
        for path in paths:
            run = PATHS[path](model, optimizer)
            gc.collect()
            live.mark()
            result = run()
            found[path] = Peak(live.extra, live.kept)
            del result, run
            gc.collect()
            if live.kept > 0:
                raise AssertionError(f"{path}: {live.kept} bytes stay on the device when its result is gone")
    return found
