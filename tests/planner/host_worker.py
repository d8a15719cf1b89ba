"""Resident bytes of a process through an optimizer's life and the plan's numbers of them, as JSON.

python host_worker.py FOLDER CHUNK MOMENTS, where CHUNK is step_chunk_bytes, or 0 for a FusedAdam alone.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from pathlib import Path

import statestream
import torch
import torch.distributed.checkpoint as dcp
from helpers.memory import own_resident_bytes, peak_extra_bytes, settle
from statestream import CPUOffloadOptimizer, FusedAdam
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def build(elements: int, count: int, chunk: int, stored: str):
    weights = {f"w{i}": torch.nn.Parameter(torch.ones(elements, dtype=torch.bfloat16)) for i in range(count)}
    model = torch.nn.ParameterDict(weights)
    moments = {"exp_avg_dtype": stored, "exp_avg_sq_dtype": stored}
    optimizer = FusedAdam(model.parameters(), master_weights=True, state_dict_cpu_offload=True, **moments)
    if chunk:
        optimizer = CPUOffloadOptimizer(optimizer, chunk)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model, optimizer


def export(model, optimizer):
    return {"optim": get_optimizer_state_dict(model, optimizer, options=FLAT)}


def load(folder: Path, model, optimizer) -> None:
    state = export(model, optimizer)
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optim"], options=FLAT)


def main(folder: Path, chunk: int, stored: str) -> None:
    warnings.simplefilter("ignore")  # one process, and it says so
    torch.set_num_threads(1)
    gc.freeze()  # what is imported: it need not be looked through at each measurement
    warm = build(512, 2, chunk, stored)  # what is imported and started once
    dcp.save(export(*warm), checkpoint_id=folder / "warm", no_dist=True)
    load(folder / "warm", *warm)
    model = torch.nn.ParameterDict()
    settle()
    before = own_resident_bytes()
    model, optimizer = build(5 << 16, 32, chunk, stored)
    settle()
    found = {"kept": own_resident_bytes() - before}
    found["export"] = peak_extra_bytes(lambda: export(model, optimizer))
    whole = {"model": get_model_state_dict(model), **export(model, optimizer)}
    dcp.save(whole, checkpoint_id=folder / "saved", no_dist=True)
    del whole
    found["on disk"] = sum(file.stat().st_size for file in (folder / "saved").rglob("*") if file.is_file())
    found["load"] = peak_extra_bytes(lambda: load(folder / "saved", model, optimizer))
    plan = statestream.plan(model, optimizer).as_dict()
    print(json.dumps({"found": found, "plan": plan}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
