"""Gradients that are made late on the simulated device, taken in backward and overwritten as soon as they are let go.

Their memory is the device's: poison until the compute queue has made them, poison again where that queue comes to once
the last reference is gone. So a copy that waits for too little, or a gradient that is let go too early, is a Hazard or
wrong bits.
"""

from __future__ import annotations

import ctypes
import random
import weakref
from itertools import accumulate

import pytest
import torch
from offload.conftest import assert_same_training, assert_same_values, make_params
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.offload.adam import host_share
from statestream.offload.gradients import staging
from statestream.streaming.plan import GRAIN_ELEMENTS

from simulated_device.device import Hazard, InjectedFault, SimulatedDevice

SHAPES = [(40, 33), (13,), (32, 32), (7,), (600,), (3, 5, 7)]
SLOT_BYTES = 4_000
HELD_BYTES = 12_000

MAKERS = {
    "fp32": lambda p, **o: FusedAdam(p, lr=0.1, weight_decay=0.1, **o),
    "masters": lambda p, **o: FusedAdam(p, lr=0.1, master_weights=True, exp_avg_dtype="bf16", **o),
    "fp8": lambda p, **o: FusedAdam(p, lr=0.1, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8", **o),
    "fp16 masters": lambda p, **o: FusedAdam(
        p, lr=0.1, master_weights=True, master_weight_dtype="fp16", exp_avg_dtype="bf16", stochastic_rounding=True, **o
    ),
}


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    for module in (host_share, staging):
        monkeypatch.setattr(module, "SLOT_BYTES", SLOT_BYTES)
    monkeypatch.setattr(staging, "HELD_BYTES", HELD_BYTES)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # as launchers have it: our own threads share the work


class DeviceWithGradients(SimulatedDevice):
    """Gives out memory for gradients, which whoever holds a tensor in it keeps: a copy that is queued does not."""

    def __init__(self, seed: int, fail_at: int | None = None):
        super().__init__(seed, fail_at=fail_at)
        self._blocks: list[torch.Tensor] = []

    def gradients(self, values: list[torch.Tensor], more: int = 0) -> list[torch.Tensor]:
        """Gradients that the compute queue makes some time, as views of one buffer that has `more` bytes besides."""
        offsets = [0, *accumulate(v.nbytes + -v.nbytes % 8 for v in values)]
        block = torch.full((offsets[-1] + more,), 0xFF, dtype=torch.uint8)
        self._blocks.append(block)
        self.live_bytes += block.numel()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._poison(block, 0, block.numel())

        def make():
            for value, at in zip(values, offsets, strict=False):
                block[at : at + value.nbytes] = value.reshape(-1).view(torch.uint8)
            self._mark(block, 0, block.numel())

        def let_go():
            self.live_bytes -= block.numel()
            self.between_steps(lambda: self._poison(block, 0, block.numel()))

        self.between_steps(make)
        memory = (ctypes.c_byte * block.numel()).from_address(block.data_ptr())
        weakref.finalize(memory, let_go)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        return [buffer[at : at + v.nbytes].view(v.dtype).view(v.shape) for v, at in zip(values, offsets, strict=False)]

    def copy(self, queue, to, to_offset, source, offset, nbytes) -> None:
        for block in self._blocks:
            if 0 <= (at := source.data_ptr() - block.data_ptr()) < block.numel():
                source, offset = block, offset + at
                break
        super().copy(queue, to, to_offset, source, offset, nbytes)


class Case:
    """One seed: an optimizer, a budget, a share of the host, threads, and which gradients each micro-batch lacks."""

    def __init__(self, seed: int, on_device, fail_at: int | None = None):
        r = self.random = random.Random(seed)
        self.seed, self.name = seed, r.choice(sorted(MAKERS))
        self.dtype = r.choice((torch.float32, torch.bfloat16, "mixed"))
        self.budget = r.choice((1, 3_000, 10_000, 20_000, 100_000, None))
        fraction, threads = r.choice((0.0, 0.25, 0.5, 1.0)), r.randrange(1, 4)
        self.micro_batches = [r.randrange(1, 4) for _ in range(3)]
        self.clipped = [r.random() < 0.5 for _ in range(3)]
        self.reduced_together, self.more = r.choice(((1, 0), (2, 0), (2, 20_000), (6, 20_000)))
        """How many parameters' gradients are views of one buffer, as FSDP2's are, and what else that holds."""
        self.device = on_device(DeviceWithGradients(seed, fail_at))
        self.params, self.reference = make_params(self.dtype, SHAPES), make_params(self.dtype, SHAPES)
        self.plain = MAKERS[self.name](self.reference, use_decoupled_grad=True)
        self.optimizer = CPUOffloadOptimizer(
            MAKERS[self.name](self.params),
            self.budget,
            cpu_fraction=fraction,
            cpu_threads=threads,
            offload_gradients=True,
        )
        self.sums: list[torch.Tensor | None] = []

    @property
    def allowed(self) -> int:
        """Bytes: of a step the budget, or a piece of 256 elements with three states, gradient and scales, 4 bytes
        each; in backward, what gradients on their way may keep, and the buffers of the last one and of the next."""
        sizes = [-(-p.numel() // GRAIN_ELEMENTS) * GRAIN_ELEMENTS for p in self.params]
        step = sum(n * 17 for n in sizes) if self.budget is None else max(self.budget, GRAIN_ELEMENTS * 17)
        buffer = self.reduced_together * max(p.numel() * 4 + 8 for p in self.params) + self.more
        return max(step, HELD_BYTES + 2 * buffer)

    def backward(self, step: int, micro_batch: int) -> None:
        """As FSDP2 and autograd do: each gradient is set, and its hooks are run."""
        r = random.Random(1000 * self.seed + 10 * step + micro_batch)
        generator = torch.Generator().manual_seed(self.seed + 100 * step + micro_batch)
        backward = [(i, p) for i, p in reversed(list(enumerate(self.params))) if r.random() >= 0.2]
        for first in range(0, len(backward), self.reduced_together):
            together = backward[first : first + self.reduced_together]
            values = [torch.randn(p.shape, generator=generator).to(p.dtype) for _, p in together]
            gradients = self.device.gradients(values, self.more)
            for (i, param), value in zip(together, values, strict=True):
                self.sums[i] = value.float() if self.sums[i] is None else self.sums[i] + value.float()
                param.grad = gradients.pop(0)
                for hook in list(param._post_accumulate_grad_hooks.values()):
                    hook(param)
                if param.grad is not None:
                    raise Hazard("a gradient is still there")

    def clip(self) -> torch.Tensor | None:
        """What torch makes of the sums."""
        there = [s for s in self.sums if s is not None]
        if not there:
            return None
        stand_ins = [torch.nn.Parameter(torch.zeros_like(s)) for s in there]
        for stand_in, total in zip(stand_ins, there, strict=True):
            stand_in.grad = total
        return torch.nn.utils.clip_grad_norm_(stand_ins, 5.0)

    def run(self) -> None:
        for step, micro_batches in enumerate(self.micro_batches):
            self.sums = [None] * len(self.params)
            for micro_batch in range(micro_batches):
                self.backward(step, micro_batch)
            if self.clipped[step]:
                norm, right = self.optimizer.clip_grad_norm_(5.0), self.clip()
                if right is not None:
                    assert_same_values(norm, right, "norm")
            for p, total in zip(self.reference, self.sums, strict=True):
                p.decoupled_grad = total
            self.plain.step()
            self.optimizer.step()
            # Gradients of the next backward come while this step's copies are still on their way. Weights would be
            # read by the compute queue: here by the host, at the end.
        self.device.settle()

    def judge(self) -> None:
        assert not self.device.live_bytes, "gradients or state are left on the device"
        assert self.device.peak_bytes <= self.allowed
        assert_same_training(self.params, self.optimizer, self.reference, self.plain)


def judged(seed: int, on_device: bool) -> None:
    case = Case(seed, on_device)
    case.run()
    case.judge()


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_every_schedule_gives_the_plain_optimizers_bits(first, on_device):
    for seed in range(first, first + 20):
        judged(seed, on_device)


@pytest.mark.long  # 10 minutes
@pytest.mark.timeout(0)
def test_three_thousand_schedules(on_device):
    for seed in range(3000):
        judged(seed, on_device)


@pytest.mark.parametrize("broken", ["nothing is let go", "nothing is waited for"])
def test_control_gradients_that_are_kept_too_long_or_let_go_too_soon_are_seen(broken, on_device, monkeypatch):
    if broken == "nothing is let go":
        monkeypatch.setattr(staging.GradientStaging, "release", lambda self, device: None)
    else:
        monkeypatch.setattr(DeviceWithGradients, "synchronize", lambda self, event: None)
    with pytest.raises(AssertionError):
        for seed in range(40):
            judged(seed, on_device)


def check_fault(seed: int, fail_at: int, on_device) -> bool:
    """The error surfaces once. In a step it leaves each parameter before or after; on the way of a gradient it makes
    the sums incomplete, which is said until they are dropped. Then training goes on with the plain optimizer's bits.
    Returns whether it was on the way of a gradient."""
    case = Case(seed, on_device, fail_at)
    try:
        case.run()
        raise AssertionError("the fault was swallowed")
    except InjectedFault as fault:
        assert str(fault) == case.device.log[fail_at]
    case.device.settle()
    assert not case.optimizer.strategy.torn
    incomplete = case.optimizer.strategy.gradients._incomplete
    for p in case.params:
        p.grad = None
    if incomplete:
        with pytest.raises(RuntimeError, match="incomplete"):
            case.optimizer.step()
    case.optimizer.zero_grad()
    case.device.settle()
    assert not case.device.live_bytes
    # From what is there the plain optimizer goes on alike: nothing of the lost sums is left.
    for p, q in zip(case.params, case.reference, strict=True):
        q.data.copy_(p.data)
    case.plain.load_state_dict(case.optimizer.state_dict())
    for p, q in zip(case.params, case.reference, strict=True):
        for name, scale in case.optimizer.inner.backend.scales.get(p, {}).items():
            case.plain.backend.scales[q][name].copy_(scale)
            case.plain.state[q][name].copy_(case.optimizer.state[p][name])
    case.micro_batches, case.clipped = [2], [True]
    case.run()
    case.judge()
    return incomplete


@pytest.mark.parametrize("first", range(0, 12, 4))
def test_an_error_at_any_call(first, on_device):
    outcomes = set()
    for seed in range(first, first + 4):
        case = Case(seed, on_device)
        case.run()
        calls = case.device.calls
        for fail_at in random.Random(seed).sample(range(calls), min(calls, 3)):
            outcomes.add(check_fault(seed, fail_at, on_device))
    assert outcomes == {False, True}


@pytest.mark.long  # 10 minutes
@pytest.mark.timeout(0)
def test_errors_at_any_call_of_many_seeds(on_device):
    for seed in range(200):
        case = Case(seed, on_device)
        case.run()
        for fail_at in range(0, case.device.calls, max(1, case.device.calls // 20)):
            check_fault(seed, fail_at, on_device)


def test_a_gradient_is_kept_until_its_last_slot_arrived(on_device):
    on_device(SimulatedDevice(1, style="late"))
    param = torch.nn.Parameter(torch.zeros(3 * SLOT_BYTES // 4 - 100))
    optimizer = CPUOffloadOptimizer(FusedAdam([param]), 20_000, offload_gradients=True)
    param.grad = torch.ones_like(param)
    optimizer._gradients.take(param, "param")
    on_its_way = [slot for slot in optimizer._gradients.staging._slots if slot.end and not slot.workers]
    filled = [slot for slot in optimizer._gradients.staging._slots if slot.end]
    assert len(filled) == 3 and on_its_way
    assert all(slot.kept for slot in filled)
