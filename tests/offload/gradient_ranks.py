"""Claims on offloaded gradients that two real processes check (test_ranks.py): FSDP2's own hooks, norms over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from helpers.devices import Beyond
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.offload import optimizer as optimizer_module
from statestream.offload import strategy as units_module
from statestream.offload.gradients import staging
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .conftest import assert_same_values

OPTIONS = {"lr": 0.1, "master_weights": True, "exp_avg_dtype": "bf16"}


class Net(nn.Module):
    """Rows that do not divide by the ranks, and one that is empty on all but the first; a layer that is never used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 5)
        self.middle = nn.Sequential(nn.Linear(5, 5), nn.GELU())
        self.single = nn.Linear(5, 1)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.single(self.middle(self.first(x)))


def sharded(mesh, dtype=torch.float32, **options):
    torch.manual_seed(0)
    net = Net().to(dtype)
    fully_shard(net.middle, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def backward(net, number):
    torch.manual_seed(100 * number + dist.get_rank())
    (100 * net(torch.randn(4, 16, dtype=net.first.weight.dtype)).square().sum()).backward()


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


class Reference:
    """The plain optimizer, and its model, whose gradients the test takes after each backward and sums in FP32."""

    def __init__(self, net):
        self.net, self.sums = net, {}
        self.optimizer = FusedAdam(net.parameters(), use_decoupled_grad=True, **OPTIONS)

    def take(self):
        for name, p in self.net.named_parameters():
            if p.grad is not None:
                self.sums[name] = self.sums[name] + p.grad.float() if name in self.sums else p.grad.float()
                p.grad = None

    def norm(self):
        return torch.nn.utils.get_total_norm(self.sums.values()).full_tensor()

    def clip(self, max_norm, norm):
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for name, total in self.sums.items():
            self.sums[name] = total * factor

    def step(self):
        for name, p in self.net.named_parameters():
            p.decoupled_grad = self.sums.get(name)
        self.optimizer.step()
        self.sums = {}


def check(net, optimizer, reference, synchronised, steps=2):
    """Four micro-batches a step; `synchronised` are those whose gradients FSDP2 reduces at once."""
    for step in range(steps):
        for micro_batch in range(4):
            for model in (net, reference.net):
                model.set_requires_gradient_sync(micro_batch in synchronised)
                backward(model, 4 * step + micro_batch)
            assert all(p.grad is None for p in net.parameters()), "a gradient is left on the device"
            if micro_batch in synchronised:
                assert optimizer.strategy.gradients.has(net.first.weight), "FSDP2 ran no hook"
            reference.take()
        norm, right = optimizer.clip_grad_norm_(1.0), reference.norm()
        assert right > 2.0, "nothing is clipped"
        # Versions of torch sum over ranks before or after they sum over parameters: a last bit may differ.
        assert not isinstance(norm, DTensor) and torch.allclose(norm, right, rtol=2e-7), f"{norm} and {right}"
        reference.clip(1.0, norm)
        optimizer.step()
        reference.step()
    for (name, p), q in zip(net.named_parameters(), reference.net.parameters(), strict=True):
        assert_same_values(local(p.detach()), local(q.detach()), name)
        for key, value in optimizer.state[p].items():
            assert_same_values(local(value), local(reference.optimizer.state[q][key]), f"{key} of {name}")


def fsdp2_gradients_are_offloaded_once_reduced(folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for dtype, synchronised, options in (
        (torch.float32, range(4), {}),
        (torch.float32, (3,), {}),
        (torch.bfloat16, (1, 3), {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}),
        (torch.float32, range(4), {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
        (torch.float32, range(4), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ):
        net, reference = sharded(mesh, dtype, **options), Reference(sharded(mesh, dtype, **options))
        optimizer = CPUOffloadOptimizer(
            FusedAdam(net.parameters(), **OPTIONS), 4096, cpu_fraction=0.5, offload_gradients=True
        )
        check(net, optimizer, reference, synchronised)


def fsdp2_gradients_come_through_slots(folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    room, staging.SLOT_BYTES = staging.SLOT_BYTES, 100
    device_for = optimizer_module.device_for
    optimizer_module.device_for = units_module.device_for = lambda _: Beyond()
    try:
        for fraction in (0.0, 0.5, 1.0):
            net, reference = sharded(mesh, torch.bfloat16), Reference(sharded(mesh, torch.bfloat16))
            optimizer = CPUOffloadOptimizer(
                FusedAdam(net.parameters(), **OPTIONS), 2048, cpu_fraction=fraction, offload_gradients=True
            )
            check(net, optimizer, reference, range(4))
    finally:
        staging.SLOT_BYTES = room
        optimizer_module.device_for = units_module.device_for = device_for


class Buffers:
    """What gradients are views of, as far as it is still there."""

    def __init__(self):
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._last = self.most = 0
        """Bytes of the one that was seen last, and the most that were there besides once a gradient was taken."""

    @property
    def held(self) -> int:
        return sum(size for storage, size in self._storages.values() if not storage.expired())

    def made(self, param):
        storage = local(param.grad).untyped_storage()
        self._last = storage.nbytes()
        self._storages[storage._cdata] = StorageWeakRef(storage), self._last

    def taken(self, param):
        self.most = max(self.most, self.held - self._last)


def gradients_on_their_way_keep_little_of_the_device(folder):
    """Beside the buffer that FSDP2 reduces just now, and when backward is over."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rooms, device_for = (staging.SLOT_BYTES, staging.HELD_BYTES), optimizer_module.device_for
    release = staging.GradientStaging.release
    staging.SLOT_BYTES, staging.HELD_BYTES = 1 << 20, 20_000
    optimizer_module.device_for = units_module.device_for = lambda _: Beyond()
    try:
        for broken in (False, True):
            buffers = Buffers()
            torch.manual_seed(0)
            # Layers of one buffer each, of which the bias is the last to be taken; the outermost is the largest.
            net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)], nn.Linear(64, 256))
            for layer in net[:-1]:
                fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
            for param in net.parameters():
                param.register_post_accumulate_grad_hook(buffers.made)
            optimizer = CPUOffloadOptimizer(FusedAdam(net.parameters()), offload_gradients=True)
            for param in net.parameters():
                param.register_post_accumulate_grad_hook(buffers.taken)
            if broken:
                staging.GradientStaging.release = lambda self, device: None
            for _ in range(2):
                net(torch.ones(2, 64)).sum().backward()
                within = buffers.most <= 20_000 and buffers.held <= 20_000
                assert within or broken, f"{buffers.most} bytes are kept in backward, {buffers.held} after it"
            assert not broken or not within, "nothing would be kept anyhow"
            assert optimizer.strategy.gradients.staging.nbytes
    finally:
        staging.SLOT_BYTES, staging.HELD_BYTES = rooms
        staging.GradientStaging.release = release
        optimizer_module.device_for = units_module.device_for = device_for


def norms_are_of_the_whole_on_every_rank_whatever_the_placements(folder):
    """On one mesh and on two, sharded, replicated and plain, with a gradient that only one rank has."""
    ranks = dist.get_world_size()
    mesh, nested = init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (1, ranks), mesh_dim_names=("a", "b"))
    torch.manual_seed(1)
    whole = [torch.randn(5, 7), torch.randn(4, 6), torch.randn(9), torch.randn(3, 2), torch.randn(6, 4)]
    placed = [
        (mesh, [Shard(0)]), (mesh, [Replicate()]), (None, None), (nested, [Replicate(), Shard(1)]), (mesh, [Shard(1)])
    ]  # fmt: skip
    params = [
        nn.Parameter(torch.zeros(v.shape) if on is None else distribute_tensor(torch.zeros(v.shape), on, how))
        for v, (on, how) in zip(whole, placed, strict=True)
    ]
    optimizer = CPUOffloadOptimizer(FusedAdam(params), offload_gradients=True)
    for norm_type in (1.0, 2.0, float("inf")):
        for p, value, (on, how) in zip(params, whole, placed, strict=True):
            p.grad = value.clone() if on is None else distribute_tensor(value, on, how)
        half = whole[4].clone()
        if dist.get_rank():  # the other rank's columns count, its own it never computed
            params[4].grad = None
            optimizer.strategy.gradients.clear()
        half[:, 2:] = 0
        expected = torch.cat([v.flatten() for v in (*whole[:4], half)]).norm(norm_type)
        norm = optimizer.clip_grad_norm_(1.0, norm_type)
        assert torch.allclose(norm, expected, rtol=1e-6, atol=0), f"{norm_type}: {norm} and {expected}"
        seen = [None] * ranks
        dist.all_gather_object(seen, norm.item())
        assert len(set(seen)) == 1, seen
        again = optimizer.clip_grad_norm_(1.0, norm_type)
        assert torch.allclose(again, torch.tensor(1.0), rtol=1e-5), f"{norm_type}: clipped to {again}"
        optimizer.zero_grad()


def a_step_under_ddp_is_refused(folder):
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
    optimizer = CPUOffloadOptimizer(FusedAdam(net.named_parameters()), offload_gradients=True)
    before = net.module.weight.detach().clone()
    net(torch.randn(2, 4)).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        assert "DistributedDataParallel" in str(error) and "module.weight" in str(error), error
    else:
        raise AssertionError("gradients that were never reduced made a step")
    assert torch.equal(before, net.module.weight)


CLAIMS = {
    claim.__name__: claim
    for claim in (
        fsdp2_gradients_are_offloaded_once_reduced,
        fsdp2_gradients_come_through_slots,
        gradients_on_their_way_keep_little_of_the_device,
        norms_are_of_the_whole_on_every_rank_whatever_the_placements,
        a_step_under_ddp_is_refused,
    )
}
