"""One case of every claim, as functions of nothing that return what has to have the same bits in every world.

To add a claim, write a function with @claim. Its own tensors say dtype and device; what it names by `random` is right.
Run as a program, in a Python of other settings, it saves what all claims found:

    python -bb -m worlds.claims FILE
"""

from __future__ import annotations

import copy
import pickle
import sys
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from helpers.bits import snapshot
from helpers.devices import Beyond
from helpers.modes import BF16, FP8, FP16, FP32, Mode
from helpers.training import build, train
from statestream import CPUOffloadOptimizer, FusedAdam, plan
from statestream.device.queues import HostDevice
from statestream.offload import optimizer as optimizer_module
from statestream.offload import strategy as units_module
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn import Parameter

__all__ = ["CLAIMS"]

Found = dict[str, Any]
CLAIMS: dict[str, Callable[[], Found]] = {}

MASTERS = Mode(BF16, BF16, BF16, "fp32")
MODES = {
    "FP32": Mode(FP32),
    "masters, BF16 moments": MASTERS,
    "remainders": Mode(BF16, FP32, FP32, "remainders"),
    "FP8": Mode(None, FP8, FP8, "fp32"),
    "FP16, masters too": Mode(FP16, FP16, FP16, "fp16"),
    "stochastic": Mode(BF16, BF16, FP8, stochastic=True),
}


def claim(function: Callable[[], Found]) -> Callable[[], Found]:
    CLAIMS[function.__name__] = function
    return function


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def params(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    return [Parameter(random(*shape, seed=i, dtype=dtype)) for i, shape in enumerate([(300, 7), (33, 20), (1000,)])]


def trained(mode: Mode) -> tuple[FusedAdam, dict[int, Tensor]]:
    """After two steps, and its weights by their numbers."""
    optimizer = build(mode)
    train(optimizer, range(2))
    return optimizer, {i: p.detach() for i, p in enumerate(optimizer._params())}


def of_all(each: Callable[[Mode], Found]) -> Found:
    return {f"{name}: {key}": value for name, mode in MODES.items() for key, value in each(mode).items()}


def both_ways(run: Callable[[Callable[[FusedAdam], Any]], Found]) -> Found:
    """Of a FusedAdam by itself, and streamed."""
    ways = {"plain": lambda optimizer: optimizer, "offloaded": lambda optimizer: CPUOffloadOptimizer(optimizer, 20_000)}
    return {f"{name} {key}": value for name, wrap in ways.items() for key, value in run(wrap).items()}


def tensors_of(state_dict: Any, at: str = "") -> Found:
    """Every value of nested dicts and lists, by its path."""
    if not isinstance(state_dict, (dict, list, tuple)):
        return {at: state_dict}
    items = state_dict.items() if isinstance(state_dict, dict) else enumerate(state_dict)
    return {key: value for name, inner in items for key, value in tensors_of(inner, f"{at}.{name}").items()}


# ---- FusedAdam ----


@claim
def steps() -> Found:
    def run(mode: Mode) -> Found:
        optimizer = build(mode)
        train(optimizer, range(3))
        return snapshot(optimizer)

    return of_all(run)


@claim
def steps_of_a_schedule_by_a_tensor() -> Found:
    optimizer = FusedAdam(params(), lr=torch.tensor(0.1, dtype=torch.float32, device="cpu"))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(3):
        train(optimizer, [step])
        scheduler.step()
    return snapshot(optimizer)


@claim
def capturable_steps() -> Found:
    optimizer = build(MASTERS, capturable=True)
    train(optimizer, range(3))
    return snapshot(optimizer)


@claim
def scaled_and_skipped_steps() -> Found:
    def run(wrap: Callable[[FusedAdam], Any]) -> Found:
        optimizer = wrap(FusedAdam(params(), lr=0.1))
        for step, found_inf in enumerate([0.0, 1.0, 0.0]):
            optimizer.grad_scale = torch.tensor(8.0, dtype=torch.float32, device="cpu")
            optimizer.found_inf = torch.tensor(found_inf, dtype=torch.float32, device="cpu")
            train(optimizer, [step])
        return snapshot(optimizer)

    return both_ways(run)


@claim
def weights_written_between_steps() -> Found:
    def run(wrap: Callable[[FusedAdam], Any]) -> Found:
        optimizer = wrap(build(MASTERS))
        train(optimizer, range(2))
        with torch.no_grad():
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.mul_(1.5)
        train(optimizer, [2])
        optimizer.refresh_masters()
        return snapshot(optimizer)

    return both_ways(run)


# ---- state dicts ----


@claim
def saved_and_loaded() -> Found:
    def run(mode: Mode) -> Found:
        to_host = mode.param is BF16
        optimizer, resumed = (build(mode, seed, state_dict_cpu_offload=to_host) for seed in range(2))
        train(optimizer, [0])
        file = BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        with torch.no_grad():
            for mine, theirs in zip(resumed._params(), optimizer._params(), strict=True):
                mine.copy_(theirs)
        resumed.load_state_dict(saved)
        train(resumed, [1])
        return tensors_of(saved, "saved") | snapshot(resumed)

    return of_all(run)


@claim
def single_states() -> Found:
    optimizer = build(Mode(BF16, FP8, FP16, "fp32"))
    train(optimizer, [0])
    param = optimizer.param_groups[0]["params"][0]
    values = optimizer.get_unscaled_state(param, "exp_avg")
    optimizer.set_scaled_state(param, "exp_avg", values * 2)
    return {"values": values, **snapshot(optimizer)}


@claim
def dict_of_adamw() -> Found:
    saved = {
        "state": {
            i: {
                "step": torch.tensor(3.0, dtype=torch.float32, device="cpu"),
                "exp_avg": random(*p.shape, seed=7),
                "exp_avg_sq": random(*p.shape, seed=8).square(),
            }
            for i, p in enumerate(params())
        },
        "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}],
    }

    def run(wrap: Callable[[FusedAdam], Any]) -> Found:
        optimizer = wrap(FusedAdam(params(), exp_avg_dtype="fp8"))
        optimizer.load_state_dict(saved)
        train(optimizer, [0])
        return snapshot(optimizer)

    return both_ways(run)


@claim
def through_dcp() -> Found:
    def run(wrap: Callable[[FusedAdam], Any]) -> Found:
        models = [torch.nn.Linear(30, 20, dtype=torch.bfloat16, device="cpu") for _ in range(2)]
        for model in models:
            for i, param in enumerate(model.parameters()):
                param.data.copy_(random(*param.shape, seed=i))
        first, second = (wrap(FusedAdam(m.named_parameters(), master_weights=True)) for m in models)
        train(first, range(2))
        with tempfile.TemporaryDirectory() as folder:
            dcp.save({"optim": get_optimizer_state_dict(models[0], first)}, checkpoint_id=folder, no_dist=True)
            empty = {"optim": get_optimizer_state_dict(models[1], second)}
            dcp.load(empty, checkpoint_id=folder, no_dist=True)
        models[1].load_state_dict(models[0].state_dict())
        set_optimizer_state_dict(models[1], second, empty["optim"])
        train(second, [2])
        return snapshot(second)

    return both_ways(run)


@claim
def copies() -> Found:
    def run(wrap: Callable[[FusedAdam], Any]) -> Found:
        optimizer, found = wrap(build(Mode(BF16, FP8, FP16, "fp32"))), {}
        train(optimizer, [0])
        for how, copied in (("deep", copy.deepcopy(optimizer)), ("pickle", pickle.loads(pickle.dumps(optimizer)))):
            train(copied, [1])
            found |= {f"{how} {key}": value for key, value in snapshot(copied).items()}
        return found

    return both_ways(run)


# ---- CPUOffloadOptimizer ----


def on_device(device: Any) -> Any:
    return mock.patch.multiple(optimizer_module, device_for=lambda _: device), mock.patch.multiple(
        units_module, device_for=lambda _: device
    )


@claim
def streamed_steps() -> Found:
    def run(mode: Mode) -> Found:
        optimizer = CPUOffloadOptimizer(build(mode), 5_000)
        train(optimizer, range(2))
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.add_param_group({"params": [Parameter(random(40, seed=9, dtype=torch.bfloat16))]})
        train(optimizer, [2])
        return snapshot(optimizer)

    return of_all(run)


@claim
def steps_shared_with_the_host() -> Found:
    found = {}
    for fraction in (0.5, 1, "auto"):
        for device in (HostDevice, Beyond):
            here, there = on_device(device())
            with here, there:
                optimizer = CPUOffloadOptimizer(build(MASTERS), 5_000, cpu_fraction=fraction, cpu_threads=2)
                train(optimizer, range(3))
            found |= {f"{fraction} {device.__name__} {k}": v for k, v in snapshot(optimizer).items()}
    return found


@claim
def offloaded_gradients_clipped() -> Found:
    found = {}
    for device in (HostDevice, Beyond):
        here, there = on_device(device())
        with here, there, torch.inference_mode(False), torch.enable_grad():
            mine = params(torch.bfloat16)
            optimizer = CPUOffloadOptimizer(FusedAdam(mine, master_weights=True), 5_000, offload_gradients=True)
            for step in range(2):
                for micro_batch in range(2):
                    sum((p.float() * random(*p.shape, seed=step + micro_batch)).sum() for p in mine).backward()
                found[f"{device.__name__} norm {step}"] = optimizer.clip_grad_norm_(1.0)
                optimizer.step()
        found |= {f"{device.__name__} {key}": value for key, value in snapshot(optimizer).items()}
        found[f"{device.__name__} norm of none"] = optimizer.clip_grad_norm_(1.0)
    return found


@claim
def muon_streamed() -> Found:
    optimizer = CPUOffloadOptimizer(
        torch.optim.Muon([Parameter(random(6, 5, seed=i)) for i in range(2)], ns_steps=1), 3_000
    )
    train(optimizer, [0])
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, [1])
    return snapshot(optimizer)


@claim
def other_optimizers_streamed() -> Found:
    found = {}
    # SGD: other optimizers of torch make counters of the default dtype, on the default device.
    for name, how in (("chunks", {"step_chunk_bytes": 20_000}), ("one pass", {"per_parameter": False})):
        mine = params()
        optimizer = CPUOffloadOptimizer(torch.optim.SGD(mine, lr=0.1, momentum=0.9), **how)
        train(optimizer, range(2))
        optimizer.load_state_dict(optimizer.state_dict())
        train(optimizer, [2])
        found |= {f"{name} weight {i}": param.detach().clone() for i, param in enumerate(mine)}
    return found


# ---- what goes with them ----


@claim
def plans_and_reports() -> Found:
    model = torch.nn.Linear(300, 70, dtype=torch.bfloat16, device="cpu")
    inner = FusedAdam(model.parameters(), master_weights=True)
    found = {"plan": str(plan(model, inner)), "report": str(inner.memory_report())}
    optimizer = CPUOffloadOptimizer(inner, 20_000)
    train(optimizer, [0])
    optimizer.state_dict()
    return found | {
        "streamed": str(plan(model, optimizer)),
        "its plan": str(optimizer.plan),
        "its report": str(optimizer.memory_report()),
    }


@claim
def conversions_in_memory() -> Found:
    from statestream.convert import convert_state_dict, fp32_weights

    found = {}
    for name in ("masters, BF16 moments", "remainders"):
        optimizer, weights = trained(MODES[name])
        saved = optimizer.state_dict()
        converted = convert_state_dict(saved, "statestream", masters="float32", weights=weights)
        found |= tensors_of(converted, f"{name} converted")
        found |= tensors_of(dict(fp32_weights(saved, weights)), f"{name} weights")
    return found


@claim
def conversions_on_disk() -> Found:
    from statestream.convert import convert_checkpoint, convert_file

    found = {}
    model = torch.nn.Linear(30, 20, dtype=torch.bfloat16, device="cpu")
    for i, param in enumerate(model.parameters()):
        param.data.copy_(random(*param.shape, seed=i))
    optimizer = FusedAdam(model.named_parameters(), **MODES["remainders"].arguments)
    train(optimizer, range(2))
    content = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(content, folder / "file.pt")
        convert_file(folder / "file.pt", folder / "torch.pt", "torch", masters="weights")
        found |= tensors_of(torch.load(folder / "torch.pt", weights_only=True), "file")
        named = {"model": content["model"], "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(named, checkpoint_id=folder / "dcp", no_dist=True)
        convert_checkpoint(folder / "dcp", folder / "torch", "torch", masters="weights")
        loaded = {"model": {key: torch.zeros_like(value) for key, value in content["model"].items()}}
        dcp.load(loaded, checkpoint_id=folder / "torch", no_dist=True)
    return found | tensors_of(loaded, "folder")


@claim
def the_machines_checksums() -> Found:
    from statestream.doctor import self_test

    with mock.patch.object(self_test, "CASES", {"FP32": self_test.CASES["FP32"]}):
        return {"wrong": self_test.differing(torch.device("cpu"))}


if __name__ == "__main__":
    torch.save({name: function() for name, function in CLAIMS.items()}, Path(sys.argv[1]))
