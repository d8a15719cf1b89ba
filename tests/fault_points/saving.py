"""Processes that die or run out of disk while they save: ``python -m fault_points.saving FOLDER SEED KILLS``.

This process imports everything once and forks the ones that die. It prints one line of JSON a trial.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.models import Net, grouped, train_model
from statestream import CPUOffloadOptimizer, FusedAdam
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

__all__ = ["full_disk", "killed"]


def built(wrapped: bool) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net(torch.bfloat16)
    # Large enough that a save takes a while.
    model.register_parameter("wide", torch.nn.Parameter(torch.randn(1000, 700).bfloat16()))
    optimizer = FusedAdam(grouped(model), master_weights=True, exp_avg_dtype="bf16", state_dict_cpu_offload=True)
    return model, CPUOffloadOptimizer(optimizer, 1 << 20) if wrapped else optimizer


def digest(optimizer: Any) -> str:
    found = hashlib.sha256()
    for index, state in sorted(optimizer.state_dict()["state"].items()):
        for name, value in sorted(state.items()):
            found.update(f"{index} {name}".encode())
            found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def both(model: Net, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def saved(model: Net, optimizer: Any, folder: Path, how: str) -> None:
    state_dict = both(model, optimizer)
    if how == "async_save":
        dcp.async_save(state_dict, checkpoint_id=folder).result()
    else:
        dcp.save(state_dict, checkpoint_id=folder)


def loaded(folder: Path, wrapped: bool) -> str:
    model, optimizer = built(wrapped)
    state_dict = both(model, optimizer)
    dcp.load(state_dict, checkpoint_id=folder)  # the weights in place: masters that differ from them would not be kept
    set_optimizer_state_dict(model, optimizer, state_dict["optimizer"])
    return digest(optimizer)


def _alone(folder: Path) -> None:
    """A world of this process: async_save asks for one."""
    folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)


def _child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def _saves_for_ever(folder: Path, how: str, wrapped: bool, tell: int) -> None:
    _alone(folder)
    model, optimizer = built(wrapped)
    for number in range(1000):
        train_model(model, optimizer, [number])
        os.write(tell, f"begins {number} {digest(optimizer)}\n".encode())
        saved(model, optimizer, folder / f"{number}", how)
        os.write(tell, f"ended {number}\n".encode())


def killed(folder: Path, how: str, wrapped: bool, draw: random.Random) -> dict[str, Any]:
    """A process that saves one checkpoint after another is killed at a random moment of the third or a later one."""
    read, write = os.pipe()
    pid = _child(lambda: _saves_for_ever(folder, how, wrapped, write))
    os.close(write)
    digests: dict[int, str] = {}
    complete: list[int] = []
    began = length = 0.0
    with os.fdopen(read) as lines:
        for line in lines:
            what, number, *rest = line.split()
            if what == "begins":
                digests[int(number)], began = rest[0], time.monotonic()
            else:
                complete.append(int(number))
                length = time.monotonic() - began
            if what == "begins" and len(complete) >= 2:
                break
        time.sleep(draw.random() * length)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for line in lines:  # what it told before it died
            if line.startswith("ended") and line.endswith("\n"):
                complete.append(int(line.split()[1]))
            elif line.startswith("begins") and line.endswith("\n"):
                digests[int(line.split()[1])] = line.split()[2]
    with_metadata = [number for number in digests if (folder / f"{number}" / ".metadata").exists()]
    right = [number for number in with_metadata if loaded(folder / f"{number}", wrapped) == digests[number]]
    return {"how": how, "wrapped": wrapped, "begun": len(digests), "complete": complete, "with_metadata": with_metadata,
            "right": right}  # fmt: skip


def full_disk(folder: Path, how: str, wrapped: bool) -> dict[str, Any]:
    """Files may only become so long; then they may be longer."""
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails, and the process lives
    model, optimizer = built(wrapped)
    train_model(model, optimizer, range(2))
    before, most = digest(optimizer), resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(place: Path) -> None:
        if how == "torch.save":
            torch.save((model.state_dict(), optimizer.state_dict()), place)
        else:
            saved(model, optimizer, place, how)

    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, most[1]))
    try:
        save(folder / "full")
        error = ""
    except BaseException as found:  # dcp's own is no Exception
        error = f"{type(found).__name__}: {found}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    after = digest(optimizer)
    save(folder / "again")
    if how == "torch.save":
        model, fresh = built(wrapped)
        weights, state = torch.load(folder / "again", weights_only=True)
        model.load_state_dict(weights)
        fresh.load_state_dict(state)
        again = digest(fresh)
    else:
        again = loaded(folder / "again", wrapped)
    return {"how": how, "wrapped": wrapped, "error": error, "unchanged": before == after, "again": again == before,
            "looks_complete": (folder / "full" / ".metadata").exists()}  # fmt: skip


def main(folder: str, seed: str, kills: str) -> None:
    torch.set_num_threads(1)
    draw = random.Random(int(seed))
    for number in range(int(kills)):
        for how in ("save", "async_save"):
            wrapped = draw.random() < 0.5
            print(json.dumps(killed(Path(folder) / f"{how} {number}", how, wrapped, draw)), flush=True)
    for how in ("torch.save", "save"):
        for wrapped in (False, True):
            print(json.dumps(full_disk(Path(folder) / f"full {how} {wrapped}", how, wrapped)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
