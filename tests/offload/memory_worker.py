"""Resident bytes of a process at each moment of an offloaded optimizer's life, as JSON (test_memory.py runs it)."""

import gc
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed.checkpoint as dcp
from helpers.devices import Beyond
from helpers.memory import own_resident_bytes
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.offload import optimizer as optimizer_module
from statestream.streaming.host_pipeline import SLOT_BYTES

MiB = 1 << 20
ELEMENTS = 6 * MiB
STEPPED_ELEMENTS = 20 * MiB
"""Where the host steps: enough to fill its slots."""

CASES = {
    "fused_adam_bf16": lambda p: FusedAdam(p, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"),
    "fused_adam": FusedAdam,
    "adamw": torch.optim.AdamW,
}


def resident() -> int:
    gc.collect()
    return own_resident_bytes()


@contextmanager
def saving_async(state_dict: dict) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process, and it says so
        writing = dcp.async_save({"optimizer": state_dict}, checkpoint_id=directory, no_dist=True)
        yield
        writing.result()


def shared(sizes: list[int], dtype: torch.dtype) -> dict[str, int]:
    """Bytes beyond those at the start, of BF16 moments and FP32 masters that the host steps by itself."""
    params = [torch.nn.Parameter(torch.ones(n, dtype=dtype)) for n in sizes]
    for p in params:
        p.grad = torch.ones_like(p)
    base = resident()
    inner = FusedAdam(params, master_weights=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    optimizer = CPUOffloadOptimizer(inner, cpu_fraction=1)
    for _ in range(2):
        optimizer.step()
    return {"steady": resident() - base, "staging": optimizer.plan.staging_bytes, "slots": 3 * SLOT_BYTES}


def offloaded(n: int, dtype: torch.dtype) -> dict[str, int]:
    """Bytes beyond those at the start, with gradients that backward offloads: once they are there, and after a step."""
    param = torch.nn.Parameter(torch.ones(n, dtype=dtype))
    base = resident()
    inner = FusedAdam([param], master_weights=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    optimizer = CPUOffloadOptimizer(inner, cpu_fraction=1, offload_gradients=True)
    found = {}
    for _ in range(2):
        for _ in range(2):
            param.sum().backward()
        optimizer.clip_grad_norm_(1.0)
        found["after_backward"] = resident() - base
        optimizer.step()
        found["after_step"] = resident() - base
    found["staging"] = optimizer.plan.staging_bytes
    return found


def life(make: Callable, sizes: list[int], snapshot: bool) -> dict[str, int]:
    """Bytes beyond those at the start: `gone` is once the optimizer was deleted."""
    params = [torch.nn.Parameter(torch.ones(n)) for n in sizes]
    for p in params:
        p.grad = torch.ones_like(p)
    base = resident()
    optimizer = CPUOffloadOptimizer(make(params), 3 * MiB, state_dict_snapshot=snapshot)
    optimizer.step()
    found = {"host_state_bytes": optimizer.host_state_bytes, "steady": resident() - base}
    saved = optimizer.state_dict()
    found["saving"] = resident() - base
    optimizer.load_state_dict(saved)
    found["loading"] = resident() - base
    if snapshot:
        with saving_async(saved):
            found["async_saving"] = resident() - base
        found["async_saved"] = resident() - base
    del saved
    found["after"] = resident() - base
    del optimizer
    found["gone"] = resident() - base
    return found


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*need more than step_chunk_bytes")
    gc.freeze()  # what is imported: it need not be looked through at each measurement
    sizes, stepped_sizes = [ELEMENTS // 2] * 2, [STEPPED_ELEMENTS // 2] * 2
    found: dict = {"elements": ELEMENTS, "stepped_elements": STEPPED_ELEMENTS}
    for name, make in CASES.items():
        life(make, [9, 9], True)  # what is loaded and started once
        found[name] = {"snapshot": life(make, sizes, True), "live": life(make, sizes, False)}
    optimizer_module.device_for = lambda _: Beyond()
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        shared([9, 9], dtype)
        found[f"shared_{name}"] = shared(stepped_sizes, dtype)
        offloaded(9, dtype)
        found[f"offloaded_{name}"] = offloaded(STEPPED_ELEMENTS, dtype)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
