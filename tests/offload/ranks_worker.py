"""What two real processes check (test_ranks.py starts them): FSDP2 models, uneven and empty shards."""

from __future__ import annotations

import copy
import warnings

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
from torch.distributed.tensor import DTensor

from .conftest import assert_same_values

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


def check(name, dtype, chunk, mesh, directory, flattened=()):
    make = MAKERS[name]
    reference, net = model(name, dtype, mesh), model(name, dtype, mesh)
    plain = make(reference.parameters())
    optimizer = CPUOffloadOptimizer(make(net.parameters()), chunk)
    assert everywhere_equal(optimizer.units.store.plan), "ranks have different plans"
    train(reference, plain, range(3))
    train(net, optimizer, range(3))
    assert_same(net, optimizer, reference, plain)
    for flatten in flattened:
        options = StateDictOptions(flatten_optimizer_state_dict=flatten, cpu_offload=True)
        saved = get_optimizer_state_dict(net, optimizer, options=options)
        path = f"{directory}/{name}-{dtype}-{chunk}-{flatten}"
        dcp.save({"optimizer": saved}, checkpoint_id=path)
        again = model(name, dtype, mesh)
        again.load_state_dict(net.state_dict())
        resumed = CPUOffloadOptimizer(make(again.parameters()), None)
        fresh = {"optimizer": get_optimizer_state_dict(again, resumed, options=options)}
        dcp.load(fresh, checkpoint_id=path)
        set_optimizer_state_dict(again, resumed, fresh["optimizer"], options=options)
        ahead, ahead_plain = copy.deepcopy(reference.state_dict()), copy.deepcopy(plain.state_dict())
        train(again, resumed, range(3, 5))
        train(reference, plain, range(3, 5))
        assert_same(again, resumed, reference, plain)
        reference.load_state_dict(ahead)
        plain.load_state_dict(ahead_plain)


def run(rank, ranks, directory):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for name in MAKERS:
        check(name, torch.float32, 4096, mesh, directory, flattened=(True,))
        check(name, torch.float32, None, mesh, directory)
        check(name, torch.bfloat16, 1, mesh, directory)
    check("fused_adam_masters", torch.bfloat16, 4096, mesh, directory, flattened=(True, False))
    dist.barrier()  # a rank that leaves early takes the others' last collective with it
    dist.destroy_process_group()
