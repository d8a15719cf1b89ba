"""`statestream.plan`: the plan of a model that is there, on this rank, by its own tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statestream.formats import REMAINDERS, Format
from statestream.planner.formats import MASTERS, MOMENTS, WEIGHTS, format_named
from statestream.planner.mesh import Share
from statestream.planner.model import Parameter
from statestream.planner.plans import Plan, make_plan, room
from statestream.planner.quantities import BadOption
from statestream.planner.settings import Settings
from statestream.planner.times import Rates

if TYPE_CHECKING:
    import torch

__all__ = ["plan"]


def plan(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    gpu_memory: str | int | None = None,
    reserve: str | int | None = None,
    link: str | int | None = None,
    device_bandwidth: str | int | None = None,
    disk: str | int | None = None,
    **options: Any,
) -> Plan:
    """What training `model` takes on this rank, in bytes: of its own local tensors, on whatever device (meta too).

    Args:
        model: its parameters, sharded or not; buffers and frozen parameters count as weights alone.
        optimizer: a FusedAdam or a CPUOffloadOptimizer of one, whose settings are taken.
        gpu_memory, reserve: bytes, or texts such as "80GiB": then the plan proposes what fits. `reserve` is kept for
            activations and what else is not counted; a fifth of gpu_memory by default.
        link, device_bandwidth, disk: bytes a second, or texts such as "55GB/s": then the plan has times.
        options: without an optimizer, what `statestream plan` takes by these names: moments="bf16",
            masters="remainders", grads="fp32", offload=True, chunk="1GiB", offload_gradients=True, export="host",
            staging="64MiB".

    Raises:
        ValueError: an option that cannot be, by its name.
        TypeError: an optimizer of which no plan is made, or an unknown option.
    """
    if optimizer is not None and options:
        raise TypeError(f"plan() takes the settings of the optimizer; {next(iter(options))!r} cannot be given as well")
    settings = Settings.checked(**options) if optimizer is None else _settings_of(optimizer)
    memory, kept = room("gpu_memory", gpu_memory, reserve)
    shares, lazy = _shares(model, optimizer)
    remarks = (f"Not counted, since they are not initialized: {', '.join(lazy)}.",) if lazy else ()
    return make_plan(
        shares,
        settings,
        source=type(model).__name__,
        remarks=remarks,
        ranks=_ranks(model),
        rates=Rates.checked(link, device_bandwidth, disk),
        gpu_memory=memory,
        reserve=kept,
    )


def _shares(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[list[Share], list[str]]:
    """And the names of parameters and buffers that have no shape yet."""
    from torch.nn.parameter import is_lazy

    from statestream.tensors.local import local_of

    members = None
    if optimizer is not None:
        members = {id(p) for group in optimizer.param_groups for p in group["params"]}
    shares, lazy = [], []
    for name, param in model.named_parameters():
        if is_lazy(param):
            lazy.append(name)
            continue
        trained = param.requires_grad and (members is None or id(param) in members)
        shares.append(Share(_described(name, param, trained), tuple(local_of(param.detach()).shape)))
    for name, buffer in model.named_buffers():
        if is_lazy(buffer):
            lazy.append(name)
        elif buffer.is_floating_point():  # others are counters and masks
            shares.append(Share(_described(name, buffer, trained=False), tuple(local_of(buffer).shape)))
    return shares, lazy


def _described(name: str, tensor: torch.Tensor, trained: bool) -> Parameter:
    from statestream.tensors.local import local_of
    from statestream.tensors.quantized import is_quantized

    shape = tuple(tensor.shape)
    if is_quantized(local_of(tensor.detach())):
        return Parameter(name, shape, "fp8", trained)
    try:
        return Parameter(name, shape, format_named(name, str(tensor.dtype), WEIGHTS).name, trained)
    except BadOption:
        if trained:
            raise
        return Parameter(name, shape, trained=False, itemsize=tensor.element_size())


def _ranks(model: torch.nn.Module) -> int:
    meshes = [p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")]
    return max((mesh.size() for mesh in meshes), default=1)


def _settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    from statestream.adam.fused_adam import FusedAdam
    from statestream.offload.optimizer import CPUOffloadOptimizer

    offload = isinstance(optimizer, CPUOffloadOptimizer)
    inner = optimizer.inner if offload else optimizer
    if not isinstance(inner, FusedAdam):
        raise TypeError(f"plan() knows the state of FusedAdam, not of {type(inner).__name__}; leave the optimizer out")
    state_format = inner.state_format
    master: Format | None = None
    if state_format.master_weights:
        master = (
            REMAINDERS
            if state_format.remainders
            else format_named("master_weight_dtype", inner.master_weight_dtype, MASTERS)
        )
    return Settings(
        exp_avg=format_named("exp_avg_dtype", state_format.exp_avg, MOMENTS),
        exp_avg_sq=format_named("exp_avg_sq_dtype", state_format.exp_avg_sq, MOMENTS),
        master=master,
        offload=offload,
        chunk=optimizer.step_chunk_bytes if offload else None,
        host_export=inner.state_dict_cpu_offload,
        staging=inner.export_staging_bytes,
        offload_gradients=offload and optimizer.plan.gradient_bytes > 0,
    )
