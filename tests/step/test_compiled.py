"""Steps, saves and loads in a compiled function: torch.compile does not look into them, and no bit changes."""

from __future__ import annotations

import pytest
import torch
from helpers.bits import differences, snapshot
from statestream import CPUOffloadOptimizer, FusedAdam, log_memory
from torch._dynamo import config
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*record function.*will be ignored"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

OPTIMIZERS = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.1, master_weights=True, exp_avg_dtype="bf16"),
    "streamed": lambda params: CPUOffloadOptimizer(FusedAdam(params, lr=0.1, master_weights=True), 20_000),
    "gradients": lambda params: CPUOffloadOptimizer(FusedAdam(params, lr=0.1), offload_gradients=True),
    "AdamW streamed": lambda params: CPUOffloadOptimizer(torch.optim.AdamW(params, lr=0.1)),
}
CASES = {
    "cold": (0, lambda optimizer: None),
    "cold, LambdaLR": (0, lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)),
    "warm, OneCycleLR": (2, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)),
}
"""Steps before the compiled ones, and the scheduler that is stepped in them."""


class Backend:
    """Runs a graph as it is, and counts graphs."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=OPTIMIZERS.values(), ids=OPTIMIZERS)
def make(request):
    return request.param


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 10)).to(torch.bfloat16)


def train_step(model, optimizer, scheduler):
    def step(x):
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        return loss

    return step


def batches(steps):
    for step in steps:
        yield torch.randn(5, 30, generator=torch.Generator().manual_seed(step)).bfloat16()


@pytest.mark.parametrize(("eager_steps", "schedule"), CASES.values(), ids=CASES)
def test_a_compiled_train_step_has_the_bits_of_the_plain_one_and_is_compiled_once(make, eager_steps, schedule):
    runs = []
    for backend in (None, Backend()):
        model = make_model()
        optimizer = make(model.parameters())
        step = train_step(model, optimizer, schedule(optimizer))
        for batch in batches(range(eager_steps)):
            step(batch)
        if backend is not None:
            step = torch.compile(step, backend=backend)
        losses = [step(batch).detach() for batch in batches(range(eager_steps, eager_steps + 1))]
        with config.patch(error_on_recompile=True):
            losses += [step(batch).detach() for batch in batches(range(eager_steps + 1, eager_steps + 4))]
        runs.append((losses, snapshot(optimizer)))
    (losses, plain), (compiled_losses, compiled) = runs
    assert backend.graphs == 1  # forward alone
    assert torch.equal(torch.stack(losses), torch.stack(compiled_losses))
    assert differences(plain, compiled) == []


@pytest.mark.parametrize("eager_steps", [0, 1], ids=["cold", "warm"])
def test_a_compiled_step_is_the_plain_one(make, eager_steps):
    def run(compiled: bool):
        params = [torch.nn.Parameter(torch.ones(300, 7)) for _ in range(3)]
        optimizer = make(params)
        for number in range(4):
            if compiled and number == eager_steps:
                optimizer.step = torch.compile(optimizer.step, backend="eager")
            for param in params:
                param.grad = torch.full_like(param, 0.5 + number)
            optimizer.step()
        return snapshot(optimizer)

    assert differences(run(False), run(True)) == []


def test_states_saves_loads_and_new_groups_in_a_compiled_function(make):
    def run(compiled: bool):
        params = [torch.nn.Parameter(torch.ones(30, 7)) for _ in range(2)]
        optimizer = make(params)
        added = torch.nn.Parameter(torch.ones(5))
        for param in (*params, added):
            param.grad = torch.ones_like(param)

        def all_of_it():
            double = optimizer.state[params[0]]["exp_avg"] * 2 if isinstance(optimizer, FusedAdam) else 0
            optimizer.step()
            saved = optimizer.state_dict()
            optimizer.step()
            optimizer.load_state_dict(saved)
            optimizer.add_param_group({"params": [added]})
            optimizer.step()
            return double, saved

        _, saved = (torch.compile(all_of_it, backend="eager") if compiled else all_of_it)()
        return {**snapshot(optimizer), **{f"saved {i}": s["exp_avg"] for i, s in saved["state"].items()}}

    assert differences(run(False), run(True)) == []


def test_a_compiled_model_is_saved_and_loaded_by_its_names(make):
    models = [make_model(), make_model(seed=1)]
    compiled = torch.compile(models[0], backend="eager")
    first, second = make(compiled.parameters()), make(models[1].parameters())
    step = train_step(compiled, first, None)
    for batch in batches(range(2)):
        step(batch)
    saved = get_optimizer_state_dict(compiled, first)
    models[1].load_state_dict(models[0].state_dict())
    set_optimizer_state_dict(models[1], second, saved)
    other = train_step(models[1], second, None)
    for batch in batches([2]):
        assert torch.equal(step(batch), other(batch))
    assert differences(snapshot(first), snapshot(second)) == []


def test_memory_logged_in_a_compiled_train_step_is_logged_every_time():
    model, seen, backend = make_model(), [], Backend()
    optimizer = FusedAdam(model.parameters())
    log_memory(optimizer, seen.append)
    step = torch.compile(train_step(model, optimizer, None), backend=backend)
    for batch in batches(range(3)):
        step(batch)
    assert len(seen) == 3 and backend.graphs == 1


def test_control_what_torch_compile_looks_into_costs_graphs():
    model, backend = make_model(), Backend()
    step = torch.compile(train_step(model, torch.optim.SGD(model.parameters()), None), backend=backend)
    for batch in batches(range(2)):
        step(batch)
    assert backend.graphs > 1
