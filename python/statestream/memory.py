"""What an optimizer holds in memory, and what its last step and export took on top."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from statestream.tensors.local import local_of
from statestream.text_table import text_table

__all__ = ["MemoryReport", "log_memory", "report_of"]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes. `device` and `host` are what is held now, by kind: "weights", "grads" and the keys of the state; tensors
    on the CPU are on the host. What is there twice, as tied weights are, is counted once.

    `step_device` is what the last step took of the device at its highest, `export_device` and `export_host` what the
    last `state_dict()` took, its result included; None before the first. `pinned` is how much of `host` is pinned.
    """

    device: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    step_device: int | None = None
    export_device: int | None = None
    export_host: int | None = None
    pinned: int = 0

    def scalars(self, prefix: str = "memory/") -> dict[str, int]:
        """Flat names and numbers, as loggers take them: "memory/device/exp_avg". What is None is left out."""
        found = {f"device/{kind}": nbytes for kind, nbytes in self.device.items()}
        found |= {f"host/{kind}": nbytes for kind, nbytes in self.host.items()}
        extra = {name: getattr(self, name) for name in ("step_device", "export_device", "export_host", "pinned")}
        found |= {name: nbytes for name, nbytes in extra.items() if nbytes is not None}
        return {f"{prefix}{name}": nbytes for name, nbytes in found.items()}

    def __str__(self) -> str:
        kinds = dict.fromkeys((*self.device, *self.host))
        held = [(kind, self.device.get(kind), self.host.get(kind)) for kind in kinds]
        together = [
            ("in all", sum(self.device.values()), sum(self.host.values())),
            ("last step: on top", self.step_device, None),
            ("last export: on top", self.export_device, self.export_host),
        ]
        sections = (
            [(name, *("" if nbytes is None else f"{nbytes:,}" for nbytes in sides)) for name, *sides in rows]
            for rows in (held, together)
        )
        return text_table([("bytes", "device", "host")], *sections)


def report_of(
    params: Iterable[Tensor],
    states: Mapping[Any, Mapping[str, Any] | None],
    grad_name: str = "grad",
    *,
    arenas: Mapping[str, int] | None = None,
    exported: tuple[int | None, int | None] = (None, None),
    **extra: int | None,
) -> MemoryReport:
    """Of parameters, their gradients and their state; `arenas` is state on the host that is not in `states`, `exported`
    the device and host bytes of the last export, `extra` other fields of the report."""
    held: dict[str, dict[str, int]] = {"cpu": {}, "device": {}}
    seen: set[tuple[str, int, int]] = set()

    def count(kind: str, tensor: Any) -> None:
        if not isinstance(tensor, Tensor) or is_lazy(tensor):
            return
        for part in _parts_of(local_of(tensor.detach())):
            key = (kind, part.untyped_storage()._cdata, part.storage_offset())
            if key not in seen:
                seen.add(key)
                where = held["cpu" if part.device.type == "cpu" else "device"]
                where[kind] = where.get(kind, 0) + part.numel() * part.element_size()

    for param in params:
        count("weights", param)
        count("grads", getattr(param, grad_name, None))
        for name, value in (states.get(param) or {}).items():
            count(name, value)
    for kind, nbytes in (arenas or {}).items():
        held["cpu"][kind] = held["cpu"].get(kind, 0) + nbytes
    device, host = exported
    return MemoryReport(held["device"], held["cpu"], export_device=device, export_host=host, **extra)


_COMPRESSED = {
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
    torch.sparse_coo: ("_indices", "_values"),
}


def _parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory of their own that it is made of: more than itself if it is sparse, or of a class that
    wraps some, as quantised weights are."""
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for each in inner for part in _parts_of(each)]
    return [getattr(tensor, name)() for name in _COMPRESSED.get(tensor.layout, ())] or [tensor]


def log_memory(
    optimizer: torch.optim.Optimizer, log: Callable[[dict[str, int]], object], every: int = 1
) -> RemovableHandle:
    """Calls `log` with the scalars of the optimizer's memory report after every `every`-th step.

    `log` is what a logger takes a dict of numbers with, such as ``wandb.log``. `remove()` of the handle ends it.
    ValueError where `every` is no positive number.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every: {every!r} is not a number of steps, 1 or more")
    steps = 0
    # The optimizer holds the hook. torch hands it the optimizer inside a CPUOffloadOptimizer, which reports otherwise.
    reporting = weakref.ref(optimizer)

    @torch._disable_dynamo
    def after_step(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps % every == 0:
            log(reporting().memory_report().scalars())

    return optimizer.register_step_post_hook(after_step)
