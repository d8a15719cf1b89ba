"""Claims that two real processes check (test_ranks.py): DTensors and FSDP2 models, uneven and empty shards."""

from __future__ import annotations

import warnings
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from statestream import CPUOffloadOptimizer, FusedAdam
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from . import gradient_ranks
from .conftest import SHAPES, assert_same_values, make_params
from .makers import OPTIMIZERS

MAKERS = {
    "fused_adam_masters": lambda p: FusedAdam(p, lr=0.1, master_weights=True, exp_avg_dtype="bf16"),
    "fused_adam": lambda p: FusedAdam(p, lr=0.1, state_dict_cpu_offload=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


class Net(nn.Module):
    """Rows that do not divide by the ranks: 5, 1 (empty on all ranks but the first), 33; one scalar-like bias."""

    def __init__(self, unused):
        super().__init__()
        self.first = nn.Linear(16, 5)
        self.single = nn.Linear(5, 1)
        self.wide = nn.Linear(1, 33, bias=False)
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.wide(self.single(self.first(x).relu()))


def model(name, dtype, mesh):
    torch.manual_seed(0)
    # torch's own optimizers have no state for a layer that is never used, and DCP's load misses it.
    net = Net(unused=name.startswith("fused_adam")).to(dtype)
    fully_shard(net, mesh=mesh)
    return net


def train(net, optimizer, steps):
    for step in steps:
        torch.manual_seed(100 * step + dist.get_rank())
        x = torch.randn(4, 16, dtype=net.first.weight.dtype)
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def assert_same(net, optimizer, other_net, other):
    for (name, p), q in zip(net.named_parameters(), other_net.parameters(), strict=True):
        assert_same_values(local(p.detach()), local(q.detach()), name)
        mine, theirs = optimizer.state[p], other.state[q]
        assert list(mine) == list(theirs), name
        for key, value in mine.items():
            assert type(value) is type(theirs[key]), f"{key} of {name}: {type(value)}"
            if isinstance(value, DTensor):
                assert value.placements == theirs[key].placements and value.shape == theirs[key].shape
            assert_same_values(local(value), local(theirs[key]), f"{key} of {name}")


def everywhere_equal(value) -> bool:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(v == values[0] for v in values)


def resumed(name, dtype, chunk, path, flatten, mesh):
    """Through a DCP checkpoint, with FSDP2."""
    make = MAKERS[name]
    reference, net = model(name, dtype, mesh), model(name, dtype, mesh)
    plain = make(reference.parameters())
    optimizer = CPUOffloadOptimizer(make(net.parameters()), chunk)
    assert everywhere_equal(optimizer.strategy.store.plan), "ranks have different plans"
    train(reference, plain, range(3))
    train(net, optimizer, range(3))
    assert_same(net, optimizer, reference, plain)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten, cpu_offload=True)
    saved = get_optimizer_state_dict(net, optimizer, options=options)
    dcp.save({"optimizer": saved}, checkpoint_id=path)
    again = model(name, dtype, mesh)
    again.load_state_dict(net.state_dict())
    other = CPUOffloadOptimizer(make(again.parameters()), None)
    fresh = {"optimizer": get_optimizer_state_dict(again, other, options=options)}
    dcp.load(fresh, checkpoint_id=path)
    set_optimizer_state_dict(again, other, fresh["optimizer"], options=options)
    train(again, other, range(3, 5))
    train(reference, plain, range(3, 5))
    assert_same(again, other, reference, plain)


def a_checkpoint_of_an_fsdp2_model_resumes_bit_for_bit(folder, name):
    quiet()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    resumed(name, torch.float32, 4096, folder / f"{name}-flat", True, mesh)
    if name == "fused_adam_masters":
        resumed(name, torch.bfloat16, 1, folder / f"{name}-bf16", True, mesh)
        resumed(name, torch.bfloat16, 4096, folder / f"{name}-nested", False, mesh)


# ---- every optimizer, on DTensors that need no model ----

SHARDED_SHAPES = [*SHAPES, (1, 16)]
"""On two ranks: uneven rows, and a parameter whose shard is empty on the second."""


def sharded_params(dtype, mesh):
    return [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in make_params(dtype, SHARDED_SHAPES)]


def train_sharded(optimizer, params, steps, missing=lambda step: ()):
    mesh = params[0].device_mesh
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        for i, p in enumerate(params):
            grad = distribute_tensor(torch.randn(p.shape, generator=generator).to(p.dtype), mesh, [Shard(0)])
            p.grad = None if i in missing(step) else grad
        optimizer.step()


def assert_same_params(params, optimizer, others, other):
    for i, (p, q) in enumerate(zip(params, others, strict=True)):
        assert_same_values(local(p.detach()), local(q.detach()), f"parameter {i}")
        mine, theirs = optimizer.state[p], other.state[q]
        assert list(mine) == list(theirs), f"state keys of parameter {i}"
        for key, value in mine.items():
            assert type(value) is type(theirs[key]), f"{key} of parameter {i}: {type(value)}"
            assert_same_values(local(value), local(theirs[key]), f"{key} of parameter {i}")


def five_steps_with_a_save_and_a_load_in_the_middle(folder, name, dtypes=("mixed",)):
    quiet()
    mesh, make = init_device_mesh("cpu", (dist.get_world_size(),)), OPTIMIZERS[name]

    def missing(step):
        return (1, 6) if step == 1 else ()

    for dtype in dtypes:
        reference = sharded_params(dtype, mesh)
        plain = make(reference)
        train_sharded(plain, reference, range(5), missing)
        for chunk in (1, 20_000, None):
            params, others = sharded_params(dtype, mesh), sharded_params(dtype, mesh)
            first = CPUOffloadOptimizer(make(params), chunk)
            assert everywhere_equal(first.strategy.store.plan), "ranks have different plans"
            train_sharded(first, params, range(3), missing)
            with torch.no_grad():
                for q, p in zip(others, params, strict=True):
                    local(q).copy_(local(p))
            second = CPUOffloadOptimizer(make(others), 9_000)
            second.load_state_dict(first.state_dict())
            for optimizer, ps in ((first, params), (second, others)):
                train_sharded(optimizer, ps, range(3, 5), missing)
                assert_same_params(ps, optimizer, reference, plain)


def gradients_missing_on_one_rank_alone_move_no_cut_and_hang_nothing(folder, name):
    quiet()
    mesh, make = init_device_mesh("cpu", (dist.get_world_size(),)), OPTIMIZERS[name]
    params, reference = sharded_params("mixed", mesh), sharded_params("mixed", mesh)
    optimizer, plain = CPUOffloadOptimizer(make(params), 20_000), make(reference)

    def missing(step):
        return (0, 2, 3) if step and dist.get_rank() == step % 2 else ()

    for o, ps in ((optimizer, params), (plain, reference)):
        train_sharded(o, ps, range(4), missing)
    assert everywhere_equal(optimizer.strategy.store.plan)
    assert_same_params(params, optimizer, reference, plain)


def quiet():
    warnings.filterwarnings("ignore", message=".*need more than step_chunk_bytes")


def named(claim, names, **how):
    return {f"{claim.__name__}-{name}": partial(claim, name=name, **how) for name in names}


# torch's own Rprop does not take DTensors.
_OF_DTENSORS = [name for name in OPTIMIZERS if name != "rprop"]
_LIKE_OTHERS = {
    "adamw_foreach",
    "adamw_amsgrad",
    "adam",
    "nadam",
    "rmsprop",
    "adamax",
    "asgd",
    "sgd_nesterov",
    "sgd",
    "radam",
    "adadelta",
    "fused_adam",
    "fused_adam_l2",
    "fused_adam_fp16_masters",
}
"""Their state is kept and cut as that of another optimizer of the list."""

CLAIMS = {
    **named(
        five_steps_with_a_save_and_a_load_in_the_middle, [name for name in _OF_DTENSORS if name not in _LIKE_OTHERS]
    ),
    **named(a_checkpoint_of_an_fsdp2_model_resumes_bit_for_bit, ["fused_adam_masters", "adamw"]),
    **named(
        gradients_missing_on_one_rank_alone_move_no_cut_and_hang_nothing,
        ["fused_adam_masters", "adamw", "sgd_momentum"],
    ),
    **gradient_ranks.CLAIMS,
}

OTHERS = {
    **named(five_steps_with_a_save_and_a_load_in_the_middle, [name for name in _OF_DTENSORS if name in _LIKE_OTHERS]),
    **named(a_checkpoint_of_an_fsdp2_model_resumes_bit_for_bit, MAKERS),
}

ONE_DTYPE = named(five_steps_with_a_save_and_a_load_in_the_middle, _OF_DTENSORS, dtypes=(torch.float32, torch.bfloat16))
"""All parameters of one dtype: what CLAIMS finds of both at once."""
