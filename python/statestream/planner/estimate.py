"""Bytes of one rank: what training keeps, and what a step, an export and a load take on top.

Where the numbers come from:

* device tensors: CUDA's caching allocator gives blocks of whole 512 bytes;
* a resident step takes nothing; a streamed one the ring that streaming/plan.py lays out;
* an export to the host takes one staging buffer on the device; one on the device FP32 copies of what is not FP32;
* host memory of saves and loads: docs/checkpoints.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from statestream.formats import FP32, Format, scale_count
from statestream.planner.formats import WEIGHTS, unread
from statestream.planner.mesh import Share
from statestream.planner.model import Parameter
from statestream.planner.quantities import BadOption, as_text
from statestream.planner.settings import Settings
from statestream.streaming.host_pipeline import SLOT_BYTES, SLOTS
from statestream.streaming.plan import GRAIN_ELEMENTS, Unit, make_plan

__all__ = ["Estimate", "Extra", "estimate"]

_BLOCK_BYTES = 512
_MOST_CHUNKS = 10_000
"""Times that the state may exceed a chunk: a step of more would be all latency."""
_LOAD_ITEMS = 3
"""torch's readers hold a saved tensor up to three times: bytes read, the tensor in them, and a copy."""


@dataclass(frozen=True)
class Extra:
    """Bytes beyond what is there all the time, at the highest."""

    device: int = 0
    host: int = 0


@dataclass(frozen=True)
class Estimate:
    """Bytes of the rank that holds most. `device` and `host` are what is there all the time, by kind; `load` is that of
    torch.distributed.checkpoint into a live optimizer; `weights_on_disk` and `state_on_disk` are of all ranks together.

    "transit" is what offloaded gradients take on their way to host memory: the largest, as it is made, and what is
    being copied.

    Not counted: activations, gathered layers, the CUDA context, fragmentation, step counters.
    """

    device: dict[str, int]
    host: dict[str, int]
    step: Extra
    export: Extra
    load: Extra
    weights_on_disk: int
    state_on_disk: int
    traffic: int
    """Bytes that the kernels of a step read and write."""
    exported: int
    """Bytes of this rank's export."""
    chunks: tuple[int, ...] = field(default=(), repr=False)
    """Bytes of each chunk of a streamed step."""

    @property
    def resident(self) -> int:
        """Device bytes between steps, with gradients."""
        return sum(self.device.values())

    @property
    def device_peak(self) -> int:
        """Device bytes at the highest of step, export and load."""
        return self.resident + max(self.step.device, self.export.device, self.load.device)

    @property
    def host_peak(self) -> int:
        return sum(self.host.values()) + max(self.step.host, self.export.host, self.load.host)

    @property
    def on_disk(self) -> int:
        return self.weights_on_disk + self.state_on_disk


def estimate(shares: Sequence[Share], settings: Settings, default_dtype: str = "bf16") -> Estimate:
    """`default_dtype` is that of weights of which neither the settings nor the source say how they are stored."""
    device = {"weights": 0, "grads": 0}
    host: dict[str, int] = {}
    traffic = exported = largest = on_device_export = weights_on_disk = state_on_disk = 0
    staged = False
    made, largest_made = 0, 0  # bytes of gradients that leave the device
    streamed: list[tuple[Format, ...]] = []
    for share in shares:
        weights = _weights(share.parameter, settings, default_dtype)
        n, everywhere = share.elements, share.parameter.elements
        device["weights"] += _block(weights.nbytes(n))
        weights_on_disk += weights.nbytes(everywhere)
        if not share.parameter.trained:
            continue
        grads = settings.grads or (FP32 if weights.name == "fp8" else weights)
        if settings.offload_gradients:
            made, largest_made = made + grads.nbytes(n), max(largest_made, grads.nbytes(n))
            grads = FP32  # their sums
            host["grads"] = host.get("grads", 0) + grads.nbytes(_padded(n))
        else:
            device["grads"] += _block(grads.nbytes(n))
        states = settings.states(weights)
        for name, stored in states.items():
            if settings.offload:
                host[name] = host.get(name, 0) + stored.nbytes(_padded(n))
            else:
                device[name] = device.get(name, 0) + _state_on_device(stored, n)
                staged |= stored.converts and n > 0
                on_device_export += _block(4 * n) if stored.converts else 0
            exported += n * stored.exported_itemsize
            state_on_disk += everywhere * stored.exported_itemsize
        largest = max(largest, n * 4)
        traffic += _traffic(weights, grads, states, n)
        streamed.append((*states.values(), *([grads] if settings.offload_gradients else [])))
    if settings.offload_gradients:
        device["transit"], host["transit"] = _transit(made, largest_made)
    chunks, ring = _ring(shares, settings, streamed) if settings.offload else ((), 0)
    staging = settings.staging // 2048 * 2048 if staged else 0
    to_host = settings.host_export or settings.offload
    export = Extra(staging, exported) if to_host else Extra(on_device_export, 0)
    load = Extra(staging if to_host else on_device_export, (exported if to_host else 0) + _LOAD_ITEMS * largest)
    return Estimate(
        device=device,
        host=host,
        step=Extra(device=ring),
        export=export,
        load=load,
        weights_on_disk=weights_on_disk,
        state_on_disk=state_on_disk,
        traffic=traffic,
        exported=exported,
        chunks=chunks,
    )


def _weights(parameter: Parameter, settings: Settings, default_dtype: str) -> Format:
    if parameter.itemsize is not None:
        return unread("frozen", parameter.itemsize)
    return settings.weights or WEIGHTS[parameter.dtype or default_dtype]


def _transit(made: int, largest: int) -> tuple[int, int]:
    """Device and host bytes of gradients on their way, of those that are made in one backward pass."""
    return min(made, SLOTS * SLOT_BYTES + largest), SLOTS * min(made, SLOT_BYTES)


def _block(nbytes: int) -> int:
    return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _padded(elements: int) -> int:
    return -(-elements // GRAIN_ELEMENTS) * GRAIN_ELEMENTS


def _state_on_device(stored: Format, n: int) -> int:
    scales = 4 * scale_count(n) if stored.scaled else 0
    return _block(n * stored.itemsize) + _block(scales)


def _traffic(weights: Format, grads: Format, states: dict[str, Format], n: int) -> int:
    """State is read and written, the gradient read, the weight written, and read where no FP32 master stands for it."""
    reads_weight = states.get("master_param") is None or states["master_param"].name == "remainders"
    moved = 2 * sum(stored.nbytes(n) for stored in states.values())
    return moved + grads.nbytes(n) + (2 if reads_weight else 1) * weights.nbytes(n)


def _ring(
    shares: Sequence[Share], settings: Settings, streamed: Sequence[tuple[Format, ...]]
) -> tuple[tuple[int, ...], int]:
    """Bytes of each chunk, and of the device memory that they share: the optimizer's own plan."""
    trained = [share for share in shares if share.parameter.trained]
    kinds = max(map(len, streamed), default=0)
    units = []
    for share, states in zip(trained, streamed, strict=True):
        grains = max(1, -(-share.elements // GRAIN_ELEMENTS))
        sizes = [stored.nbytes(_padded(share.elements)) for stored in states]
        units.append(Unit((*sizes, *[0] * (kinds - len(sizes))), grains))
    total = sum(unit.nbytes for unit in units)
    if settings.chunk is not None and total > settings.chunk * _MOST_CHUNKS:
        least = as_text(-(-total // _MOST_CHUNKS))
        raise BadOption(
            "chunk", f"{settings.chunk} bytes are too few for {as_text(total)} of state; use {least} or more"
        )
    plan = make_plan(units, settings.chunk)
    return tuple(chunk.nbytes for chunk in plan.chunks), plan.ring_bytes
