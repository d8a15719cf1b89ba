"""Muon over real processes: what each rank runs, and how ranks are started.

Processes are forked from a server that has torch loaded already, one set for each number of ranks; each runs all of
its cases and sends back what it found.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from statestream.offload import optimizer as optimizer_module
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import cases as shared
from .cases import ADAMW, CASES, EVEN, EXPERTS, ODD, Case, Group, Run, differences, offloaded, train

__all__ = ["CHECKPOINTED", "run_ranks"]

FEW_CHUNKS = 300_000

CHECKPOINTED = {
    "megabatched": Case(
        "megabatched", [Group(ODD), EXPERTS, Group([(128, 64)] * 3, options={"split_sizes": (64, 32, 32)}), ADAMW]
    ),
    "batched": Case("batched", [Group(EVEN), EXPERTS, ADAMW]),
    "torch": Case("torch", [Group([(64, 256), (32, 16), (64, 256)])]),
}


def run_ranks(world: int, job: str, timeout: float = 240) -> list[dict[str, object]]:
    """What `job` (a name in JOBS) returned on each of `world` ranks. A rank that died or hung fails the test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        ranks = [context.Process(target=_rank, args=(rank, world, folder, job, queue)) for rank in range(world)]
        for process in ranks:
            process.start()
        try:
            for process in ranks:
                process.join(timeout)
            alive = [i for i, process in enumerate(ranks) if process.is_alive()]
            if alive:
                raise AssertionError(f"ranks {alive} of {world} did not finish {job!r} in {timeout} s")
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
        results = [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(world)]
    for rank, result in enumerate(results):
        if "error" in result:
            raise AssertionError(f"rank {rank} of {world}: {result['error']}")
    return results


def _rank(rank: int, world: int, folder: str, job: str, queue: object) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{folder}/store", world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
        result = JOBS[job](init_device_mesh("cpu", (world,)), folder)
        dist.barrier()
    except BaseException:
        result = {"error": traceback.format_exc()}
    torch.save(result, f"{folder}/{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def _bits(mesh: DeviceMesh, folder: str) -> dict[str, object]:
    """case -> (differences from the plain optimizer with chunks of any size, chunks of the smallest)."""
    found: dict[str, object] = {}
    for name, case in CASES.items():
        plain = train(case.run(mesh))
        wrong: list[str] = []
        counts = []
        for budget in (1, FEW_CHUNKS):
            mine = train(offloaded(case.run(mesh), budget))
            counts.append(len(mine.optimizer.units.store.plan.chunks))
            wrong += [f"{d}, step_chunk_bytes={budget}" for d in differences(mine, plain)]
        found[name] = {"differences": wrong, "chunks": counts, "empty": _has_empty_shard(plain)}
    return found


def _has_empty_shard(run: Run) -> bool:
    return any(getattr(p, "_local_tensor", p).numel() == 0 for p in run.params)


class _Model(torch.nn.Module):
    def __init__(self, run: Run):
        super().__init__()
        for i, param in enumerate(run.params):
            self.register_parameter(f"weight{i}", param)


def _checkpoint(mesh: DeviceMesh, folder: str) -> dict[str, object]:
    """case -> differences between an uninterrupted plain run and one saved and resumed after two steps, in other
    chunks; and the same with a fault in what was resumed."""
    found: dict[str, object] = {}
    for name, case in CHECKPOINTED.items():
        plain = train(case.run(mesh))
        for flat in (False, True):
            for fault in (None, "momentum", "step"):
                if fault == "step" and case.layout == "torch":
                    continue
                mine = _resumed(case, mesh, f"{folder}/{name}-{flat}-{fault}", flat, fault)
                found[f"{name}, flat={flat}, fault={fault}"] = differences(mine, plain)
    return found


def _resumed(case: Case, mesh: DeviceMesh, path: str, flat: bool, fault: str | None) -> Run:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    first = train(offloaded(case.run(mesh), 1), range(2))
    model = _Model(first)
    saved = get_optimizer_state_dict(model, first.optimizer, options=options)
    dcp.save({"model": model.state_dict(), "optimizer": saved}, checkpoint_id=path)
    second = offloaded(case.run(mesh), FEW_CHUNKS)
    model = _Model(second)
    state = {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, second.optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(model, second.optimizer, state["optimizer"], options=options)
    lr = [float(g["lr"]) for g in first.optimizer.param_groups]
    assert [float(g["lr"]) for g in second.optimizer.param_groups] == lr
    if fault == "momentum":
        value = next(iter(second.optimizer.state[second.params[0]].values()))
        local = value.to_local() if hasattr(value, "to_local") else value
        local.view(torch.uint8).bitwise_xor_(1)
    if fault == "step":
        for group in second.optimizer.param_groups:
            group["step"] -= 1
    return train(second, range(2, shared.STEPS))


def _disagreement(mesh: DeviceMesh, folder: str) -> dict[str, object]:
    """How ranks that cut at different places are refused, and that ranks that agree are not."""
    found: dict[str, object] = {}
    rank = dist.get_rank()
    for name in ("megabatched, odd rows", "batched", "torch, sharded", "megabatched, DDP"):
        for what in ("budget", "order"):
            case = CASES[name]
            if what == "order":
                groups = [Group(list(reversed(g.shapes)) if rank else g.shapes, g.dim, g.options) for g in case.groups]
                case = Case(case.layout, groups, plain=True)
                if case.layout == "torch":
                    continue  # plain parameters of torch's Muon have no ranks
            run = case.run(mesh)
            try:
                offloaded(run, 1 if rank == 0 or what == "order" else FEW_CHUNKS)
                found[f"{name}, {what}"] = "accepted"
            except RuntimeError as error:
                found[f"{name}, {what}"] = str(error)
    return found


def _gathers(mesh: DeviceMesh, folder: str) -> dict[str, object]:
    """Collectives of the agreement: at construction, and in four steps."""
    from statestream.offload import muon

    calls: list[str] = []
    check: Callable = muon.check_same_plan
    muon.check_same_plan = lambda group, text: (calls.append(text), check(group, text))
    try:
        run = offloaded(CASES["megabatched, odd rows"].run(mesh), 1)
        built = len(calls)
        train(run)
    finally:
        muon.check_same_plan = check
    return {"construction": built, "steps": len(calls) - built}


def _all(mesh: DeviceMesh, folder: str) -> dict[str, object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, object] = {"bits": _bits(mesh, folder), "checkpoint": _checkpoint(mesh, folder)}
        if dist.get_world_size() > 1:
            found["disagreement"] = _disagreement(mesh, folder)
            found["gathers"] = _gathers(mesh, folder)
    return found


def _with_simulated_device(mesh: DeviceMesh, folder: str) -> dict[str, object]:
    """seed -> differences, on a device whose copies come as late as they may."""
    from simulated_device.device import SimulatedDevice

    found: dict[str, object] = {}
    for seed in range(12):
        name = sorted(CASES)[seed % len(CASES)]
        case = CASES[name]
        device = SimulatedDevice(seed * 2 + dist.get_rank())
        optimizer_module.device_for = lambda _, device=device: device
        mine = offloaded(case.run(mesh), 1)
        for step in range(shared.STEPS):
            train(mine, [step])
            device.settle()
        found[f"{seed} {name}"] = differences(mine, train(case.run(mesh)))
    return found


JOBS = {"all": _all, "simulated": _with_simulated_device}
