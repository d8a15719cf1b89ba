"""Resident bytes of a process at each moment of an offloaded optimizer's life, as JSON (test_memory.py runs it)."""

import gc
import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
import torch.distributed.checkpoint as dcp
from statestream import CPUOffloadOptimizer, FusedAdam

MiB = 1 << 20


def rss() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


@contextmanager
def saving_async(state_dict: dict) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process, and it says so
        writing = dcp.async_save({"optimizer": state_dict}, checkpoint_id=directory, no_dist=True)
        yield
        writing.result()


def main() -> None:
    torch.set_num_threads(1)
    # Tensors above 32 MiB: smaller ones the C library may keep when they are freed.
    n = 20 * MiB
    params = [torch.nn.Parameter(torch.ones(n // 2)) for _ in range(2)]
    for p in params:
        p.grad = torch.ones_like(p)
    moments = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    warm = CPUOffloadOptimizer(FusedAdam([torch.nn.Parameter(torch.ones(9))], **moments), MiB)
    warm.param_groups[0]["params"][0].grad = torch.ones(9)
    warm.step()
    warm.load_state_dict(warm.state_dict())
    with saving_async(warm.state_dict()):
        pass  # what is loaded and started once
    base = rss()
    optimizer = CPUOffloadOptimizer(FusedAdam(params, **moments), MiB)
    optimizer.step()
    found = {"stored": n * 4, "exported": n * 8, "host_state_bytes": optimizer.host_state_bytes}
    found["steady"] = rss() - base
    saved = optimizer.state_dict()
    found["saving"] = rss() - base
    optimizer.load_state_dict(saved)
    found["loading"] = rss() - base
    with saving_async(saved):
        found["async_saving"] = rss() - base
    found["async_saved"] = rss() - base
    del saved
    found["after"] = rss() - base
    for p in params:
        p.grad = None
    del optimizer
    gc.collect()
    found["gone"] = rss() - base + n * 4
    print(json.dumps(found))


if __name__ == "__main__":
    main()
