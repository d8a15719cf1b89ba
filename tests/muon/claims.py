"""What several ranks find of a streamed Muon; test_ranks.py and test_real_dion.py run these over gloo."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed.processes import Claim
from simulated_device.device import SimulatedDevice
from statestream.offload import optimizer as optimizer_module
from statestream.offload import strategy as units_module
from statestream.offload.muon import strategy as muon_module
from statestream.offload.muon.strategy import MuonStrategy
from statestream.streaming.plan import Plan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .cases import CASES, CHECKPOINTED, STEPS, Case, Group, Run, check_same, differences, offloaded, train

__all__ = ["CLAIMS", "ON_FOUR", "late_copies", "mesh_of_all", "of_cases", "of_checkpoints", "sent_in_a_step"]

SEVERAL_CHUNKS = 300_000
"""A budget, in bytes, of which a chunk gets a third: the models here need several."""


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _gathered(value: object) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# ---- bits ----


def bits_are_those_of_the_optimizer(case: Case, folder: Path) -> None:
    """After four steps, with one unit a chunk and with several; and every rank cuts at the same batches."""
    mesh = mesh_of_all()
    plain = train(case.run(mesh))

    def streamed(budget: int) -> Plan:
        mine = train(offloaded(case.run(mesh), budget))
        check_same(mine, plain)
        assert isinstance(mine.optimizer.strategy, MuonStrategy)
        plan = mine.optimizer.strategy.store.plan
        assert all(other == plan for other in _gathered(plan)), f"step_chunk_bytes={budget}"
        return plan

    each = streamed(1)
    several = streamed(sum(chunk.nbytes for chunk in each.chunks))  # of which a chunk gets a third
    assert 1 < len(several.chunks) <= len(each.chunks), f"{len(several.chunks)} chunks of {len(each.chunks)}"


def some_shard_is_empty_and_some_are_uneven(folder: Path) -> None:
    """The control of the claims about odd rows."""
    run = CASES["megabatched, odd rows"].run(mesh_of_all())
    sizes = _gathered([p.to_local().numel() for p in run.params])
    assert any(0 in rank for rank in sizes) and sizes[0] != sizes[-1]


def copies_that_come_late_in_different_ways_change_nothing(name: str, seed: int, folder: Path) -> None:
    """On simulated devices, another schedule on each rank."""
    case, mesh = CASES[name], mesh_of_all()
    device = SimulatedDevice(seed * 4 + dist.get_rank())
    modules = (optimizer_module, units_module)
    before = [module.device_for for module in modules]
    try:
        for module in modules:
            module.device_for = lambda _: device
        mine = offloaded(case.run(mesh), 1)
        for step in range(STEPS):
            train(mine, [step])
            device.settle()
    finally:
        for module, function in zip(modules, before, strict=True):
            module.device_for = function
    check_same(mine, train(case.run(mesh)))


# ---- communication ----


def sent_in_a_step(run: Run) -> list[tuple[str, list[tuple[int, ...]]]]:
    """The collectives of the first step in order, by the shapes that they send."""
    sent: list[tuple[str, list[tuple[int, ...]]]] = []
    collectives = {name: getattr(dist, name) for name in ("all_to_all", "all_gather")}

    def watched(name: str, received: Any, given: Any, **options: Any) -> Any:
        tensors = given if isinstance(given, list) else [given]
        sent.append((name, [tuple(t.shape) for t in tensors]))
        return collectives[name](received, given, **options)

    run.case.set_grads(run.params, 0)
    try:
        for name in collectives:
            setattr(dist, name, partial(watched, name))
        run.optimizer.step()
    finally:
        for name, function in collectives.items():
            setattr(dist, name, function)
    return sent


def a_streamed_step_sends_no_more_than_the_plain_one(case: Case, folder: Path) -> None:
    """Unit by unit too: the batches are the optimizer's own, and none is padded that is not padded there. (A single
    matrix under DDP is left over where it is not sent at all.)"""

    def elements(run: Run) -> int:
        return sum(math.prod(shape) for _, shapes in sent_in_a_step(run) for shape in shapes)

    plain, streamed = elements(case.run(mesh_of_all())), elements(offloaded(case.run(mesh_of_all()), 1))
    assert 0 < streamed <= plain, f"{streamed} elements, {plain} without streaming"


# ---- checkpoints ----


class _Model(torch.nn.Module):
    def __init__(self, run: Run):
        super().__init__()
        for i, param in enumerate(run.params):
            self.register_parameter(f"weight{i}", param)


def _save(run: Run, path: Path, flat: bool) -> None:
    model = _Model(run)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, run.optimizer, options=options)
    dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=path)


def _load(run: Run, path: Path, flat: bool) -> None:
    model = _Model(run)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, run.optimizer, options=options)
    saved = {"model": model.state_dict(), "optim": state}
    dcp.load(saved, checkpoint_id=path)
    set_optimizer_state_dict(model, run.optimizer, saved["optim"], options=options)


def resumed_in_the_middle_it_is_the_uninterrupted_run(case: Case, flat: bool, folder: Path) -> None:
    """Through DCP, into an optimizer with other chunks. What it loads is what was saved: momenta, counters, lr."""
    mesh = mesh_of_all()
    path = folder / f"{case.layout}-{flat}-{case.real}-{dist.get_world_size()}"
    first = train(offloaded(case.run(mesh), 1), range(2))
    _save(first, path, flat)
    second = offloaded(case.run(mesh), SEVERAL_CHUNKS)
    _load(second, path, flat)
    check_same(second, first)
    plain = train(case.run(mesh))
    check_same(train(second, range(2, STEPS)), plain)


def _one_bit(run: Run) -> None:
    momentum = next(iter(run.optimizer.state[run.params[0]].values()))
    getattr(momentum, "_local_tensor", momentum).view(torch.uint8).bitwise_xor_(1)


def _one_step_less(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["step"] -= 1


def a_resumed_run_with_a_fault_in_it_shows(layout: str, fault: Callable[[Run], None], folder: Path) -> None:
    """The control: momentum wrong by a bit, counters by one."""
    case, mesh = CHECKPOINTED[layout], mesh_of_all()
    first = train(offloaded(case.run(mesh), 1), range(2))
    path = folder / f"{layout}-{fault.__name__}"
    _save(first, path, False)
    second = offloaded(case.run(mesh), SEVERAL_CHUNKS)
    _load(second, path, False)
    fault(second)
    assert differences(train(second, range(2, STEPS)), train(case.run(mesh))) != []


def resumed_elsewhere(layout: str, flat: bool, ranks: int, folder: Path) -> None:
    """A run that was saved on `ranks` ranks goes on here, on fewer. Not of torch's Muon, which sums products over the
    ranks."""
    case, mesh = CHECKPOINTED[layout], mesh_of_all()
    run = offloaded(case.run(mesh), 1)
    _load(run, folder / f"{layout}-{flat}-False-{ranks}", flat)
    check_same(train(run, range(2, STEPS)), train(case.run(mesh)))


# ---- agreement ----


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("accepted")


def ranks_that_cut_differently_are_refused_with_both_plans(name: str, what: str, folder: Path) -> None:
    case = CASES[name]
    last = dist.get_rank() == dist.get_world_size() - 1
    budget = 1
    if what == "budget":
        budget = SEVERAL_CHUNKS if last else 1
    elif what == "order":
        groups = [Group(list(reversed(g.shapes)) if last else g.shapes, g.dim, g.options) for g in case.groups]
        case = replace(case, groups=groups, plain=True)
    run = case.run(mesh_of_all())
    momenta = {p: dict(state) for p, state in run.optimizer.state.items()}
    message = _refused(lambda: offloaded(run, budget))
    assert "cut their Muon parameters at different places" in message
    first, second = message.split("plan of rank 0 of the group:\n")[1].split("\nplan of rank ")
    number, second = second.split(":\n", 1)
    assert int(number) == dist.get_world_size() - 1
    assert first.startswith("chunk 0: ") and second.startswith("chunk 0: ") and first != second
    assert run.optimizer.state == momenta, "a refused optimizer is as it was"


def ranks_that_unfreeze_different_parameters_are_refused_again_and_again(folder: Path) -> None:
    """Before anything is updated; also for a caller who goes on after the error."""
    case = Case("batched", [Group([(16, 16), (16, 8), (8, 16)])])
    run = case.run(mesh_of_all())
    for param in run.params[1:]:
        param.requires_grad_(False)
    run = offloaded(run, 1)
    unfrozen = 1 + dist.get_rank() % 2
    run.params[unfrozen].requires_grad_(True)
    case.set_grads(run.params, 0)
    run.params[3 - unfrozen].grad = None
    before = [p.to_local().clone() for p in run.params]
    for _ in range(2):
        assert "cut their Muon parameters at different places" in _refused(run.optimizer.step)
    assert all(torch.equal(p.to_local(), old) for p, old in zip(run.params, before, strict=True))


def agreement_costs_one_gather_when_it_is_built_and_none_in_a_step(folder: Path) -> None:
    calls: list[str] = []
    check = muon_module.check_same_plan
    muon_module.check_same_plan = lambda group, text: (calls.append(text), check(group, text))
    try:
        run = offloaded(CASES["megabatched, odd rows"].run(mesh_of_all()), 1)
        assert len(calls) == 1
        train(run)
        assert len(calls) == 1
    finally:
        muon_module.check_same_plan = check


# ---- which ranks check what ----


def of_cases(cases: Mapping[str, Case]) -> dict[str, Claim]:
    return {
        f"bits are the optimizer's: {name}": partial(bits_are_those_of_the_optimizer, c) for name, c in cases.items()
    }


def of_checkpoints(cases: Mapping[str, Case], forms: Iterable[str] = ("flat", "nested")) -> dict[str, Claim]:
    claim = resumed_in_the_middle_it_is_the_uninterrupted_run
    return {
        f"a resumed run is the uninterrupted one: {name}, {form}": partial(claim, case, form == "flat")
        for name, case in cases.items()
        for form in forms
    }


def late_copies(seeds: Iterable[int]) -> dict[str, Claim]:
    """Each seed with the next of the cases."""
    names = sorted(CASES)
    return {
        f"late copies, seed {seed}": partial(
            copies_that_come_late_in_different_ways_change_nothing, names[seed % len(names)], seed
        )
        for seed in seeds
    }


_SENT = {
    f"no more is sent: {name}": partial(a_streamed_step_sends_no_more_than_the_plain_one, CASES[name])
    for name in [
        "megabatched, odd rows",
        "megabatched, packed",
        "megabatched, DDP",
        "batched",
        "batched, packed over several batches",
        "batched, odd rows, DDP",
    ]
}
_REFUSED = {
    f"another {what}: {name}": partial(ranks_that_cut_differently_are_refused_with_both_plans, name, what)
    for name, what in [
        ("megabatched, odd rows", "budget"),
        ("megabatched, odd rows", "order"),
        ("megabatched, DDP", "budget"),
        ("batched", "budget"),
        ("batched", "order"),
        ("torch, sharded", "budget"),
    ]
}
_AGREED = {
    **_REFUSED,
    "unfrozen differently": ranks_that_unfreeze_different_parameters_are_refused_again_and_again,
    "cost of agreement": agreement_costs_one_gather_when_it_is_built_and_none_in_a_step,
}
_FAULTS = {
    f"control: {layout}, {fault.__name__}": partial(a_resumed_run_with_a_fault_in_it_shows, layout, fault)
    for layout, fault in [
        ("megabatched", _one_bit),
        ("megabatched", _one_step_less),
        ("batched", _one_step_less),
        ("torch", _one_bit),
    ]
}

ON_FOUR = {
    name: CASES[name]
    for name in (
        "megabatched, odd rows",
        "megabatched, missing on some ranks",
        "batched, packed over several batches",
    )
}
"""Where the number of ranks makes a difference; the other cases run on four as long tests."""

SAVED_ON_FOUR = ("megabatched",)
ON_TWO = {
    name: case
    for name, case in CASES.items()
    if not name.endswith((", columns", ", DDP", ", BF16", "missing gradients")) or name.startswith("torch")
}
"""The others run on two as long tests, and by default in one process."""

CLAIMS: dict[int, dict[str, Claim]] = {
    4: {
        "control: shards": some_shard_is_empty_and_some_are_uneven,
        **of_cases(ON_FOUR),
        **of_checkpoints({name: CHECKPOINTED[name] for name in SAVED_ON_FOUR}, ["flat"]),
        **dict(list(_SENT.items())[::2]),
    },
    2: {
        **of_cases(ON_TWO),
        **of_checkpoints(CHECKPOINTED, ["flat"]),
        **{f"{name}, saved on 4 ranks": partial(resumed_elsewhere, name, True, 4) for name in SAVED_ON_FOUR},
        **_AGREED,
        **late_copies(range(2)),
    },
    1: {**of_checkpoints(CHECKPOINTED, ["nested"]), **_FAULTS},
}
"""By the number of ranks, in the order in which they are run."""

OTHERS: dict[int, dict[str, Claim]] = {
    4: {
        **of_cases({name: case for name, case in CASES.items() if name not in ON_FOUR}),
        **of_checkpoints(CHECKPOINTED, ["flat"]),
        **_SENT,
        **_AGREED,
    },
    2: {
        **of_cases({name: case for name, case in CASES.items() if name not in ON_TWO}),
        **of_checkpoints(CHECKPOINTED, ["nested"]),
        **_SENT,
        **late_copies(range(4)),
    },
    1: {**of_cases(CASES), **of_checkpoints(CHECKPOINTED, ["flat"])},
}
"""What these numbers of ranks find as well, as long tests."""
