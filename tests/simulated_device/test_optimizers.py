"""The whole optimizer on the simulated device: bits, bound, no host wait, and errors at every call.

Kernels of FusedAdam are put off as the schedule likes; torch's operations run at once, but as late as the compute
queue's own waits allow (tests/simulated_device/device.py).
"""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from offload.conftest import assert_same_training, assert_same_values, make_params, set_grads
from offload.makers import SignDescent
from statestream import CPUOffloadOptimizer, FusedAdam
from statestream.offload.adam import host_share
from statestream.streaming.plan import GRAIN_ELEMENTS

from simulated_device.device import Hazard, InjectedFault, SimulatedDevice

pytestmark = pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes")

MAKERS = {
    "fused_adam": lambda p: FusedAdam(p, lr=0.1, weight_decay=0.1),
    "fused_adam_masters": lambda p: FusedAdam(p, lr=0.1, master_weights=True, exp_avg_dtype="bf16"),
    "fused_adam_groups": lambda p: FusedAdam([{"params": p[:2]}, {"params": p[2:], "lr": 0.02}], lr=0.1),
    "fused_adam_fp8": lambda p: FusedAdam(p, lr=0.1, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8"),
    "fused_adam_fp16_masters": lambda p: FusedAdam(
        p, lr=0.1, master_weights=True, master_weight_dtype="fp16", exp_avg_dtype="fp16", stochastic_rounding=True
    ),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
}
SHAPES = [(40, 33), (13,), (32, 32), (7,), (600,), (3, 5, 7)]


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    """So that the host's share is many chunks."""
    monkeypatch.setattr(host_share, "SLOT_BYTES", 4_000)


class Case:
    """One seed: an optimizer, a budget, gradients missing here and there; the host's share, if it is shared."""

    def __init__(self, seed: int, on_device, fail_at: int | None = None, shared: bool = False):
        r = random.Random(seed)
        self.name = r.choice(sorted(name for name in MAKERS if not shared or name.startswith("fused")))
        self.dtype = r.choice((torch.float32, torch.bfloat16, "mixed"))
        self.budget = r.choice((1, 3_000, 10_000, 20_000, 100_000, None))
        self.missing = [{i for i in range(6) if r.random() < 0.2} for _ in range(3)]
        self.params, self.reference = make_params(self.dtype, SHAPES), make_params(self.dtype, SHAPES)
        self.device = on_device(SimulatedDevice(seed, fail_at=fail_at))
        self.plain = MAKERS[self.name](self.reference)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*need more than step_chunk_bytes")
            fraction = r.choice((0.25, 0.5, 0.5, 1.0)) if shared else 0.0
            self.optimizer = CPUOffloadOptimizer(MAKERS[self.name](self.params), self.budget, cpu_fraction=fraction)

    @property
    def allowed(self) -> int:
        """Bytes: the budget, or the smallest piece; computed here from the shapes, not from the plan."""
        sizes = [-(-p.numel() // GRAIN_ELEMENTS) * GRAIN_ELEMENTS for p in self.params]
        if self.name.startswith("fused"):
            whole = sum(n * 12 for n in sizes)
            return whole if self.budget is None else max(self.budget, GRAIN_ELEMENTS * 12)
        most = 12  # two FP32 states, and the parameter's copy
        return sum(n * most for n in sizes) if self.budget is None else max(self.budget, max(sizes) * most)

    def run(self, steps=range(3)):
        for step in steps:
            set_grads(self.reference, step, self.missing[step])
            self.plain.step()
            set_grads(self.params, step, self.missing[step])
            waits = self.device.host_waits
            self.optimizer.step()
            if self.device.host_waits > waits + (self.optimizer.cpu_fraction > 0):
                raise Hazard("the host waited inside a step")
            if self.device.live_bytes:
                raise Hazard("state is left on the device between steps")
            # The next gradients would be made by the compute queue, after the step: here by the host.
            self.device.settle()

    def judge(self):
        self.device.settle()
        assert self.device.peak_bytes <= self.allowed
        assert_same_training(self.params, self.optimizer, self.reference, self.plain)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_every_schedule_gives_the_optimizers_bits_within_the_bound(first, shared, on_device):
    for seed in range(first, first + 20):
        case = Case(seed, on_device, shared=shared)
        case.run()
        case.judge()


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("shared", [False, True])
def test_three_thousand_schedules(shared, on_device):
    for seed in range(3000):
        case = Case(seed, on_device, shared=shared)
        case.run()
        case.judge()


def check_fault(seed: int, fail_at: int, on_device, shared: bool = False) -> None:
    """Every parameter and its state is wholly before or wholly after, gradients are back, and it goes on."""
    case = Case(seed, on_device, fail_at, shared)
    failed = False
    for step in range(3):
        set_grads(case.params, step, case.missing[step])
        grads = [p.grad for p in case.params]
        # The same step by the plain optimizer, from this very state.
        before = snapshot(case.optimizer, case.params)
        try:
            case.optimizer.step()
        except InjectedFault as fault:
            assert str(fault) == case.device.log[fail_at]
            failed = True
        case.device.settle()
        assert all(p.grad is g for p, g in zip(case.params, grads, strict=True))
        after = snapshot(case.optimizer, case.params)
        expected = stepped(case, before, step)
        for i, (old, new, right) in enumerate(zip(before, after, expected, strict=True)):
            assert same(new, old) or same(new, right), f"seed {seed}, fail_at {fail_at}: parameter {i} is torn"
        assert not case.optimizer.strategy.torn and not case.device.live_bytes
        if not failed:
            assert all(same(a, b) for a, b in zip(after, expected, strict=True))
    assert failed


def snapshot(optimizer, params):
    """(value, state) of every parameter, as copies; scales are state too."""
    found = []
    for p in params:
        state = {k: v.clone() if torch.is_tensor(v) else v for k, v in optimizer.state.get(p, {}).items()}
        scales = {k + SCALES: v.clone() for k, v in scales_of(optimizer).get(p, {}).items()}
        found.append((p.detach().clone(), state | scales))
    return found


SCALES = " scales"


def scales_of(optimizer):
    inner = getattr(optimizer, "inner", optimizer)
    return inner.backend.scales if isinstance(inner, FusedAdam) else {}


def stepped(case, before, step):
    """What the plain optimizer makes of that state with that step's gradients."""
    params = [torch.nn.Parameter(value.clone()) for value, _ in before]
    plain = MAKERS[case.name](params)
    for p, (_, state) in zip(params, before, strict=True):
        if state:
            copies = {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}
            plain.state[p] = {k: v for k, v in copies.items() if not k.endswith(SCALES)}
            scales_of(plain)[p] = {k.removesuffix(SCALES): v for k, v in copies.items() if k.endswith(SCALES)}
    set_grads(params, step, case.missing[step])
    plain.step()
    return snapshot(plain, params)


def same(a, b) -> bool:
    try:
        assert_same_values(a[0], b[0])
        for name in a[1].keys() | b[1].keys():
            assert_same_values(a[1].get(name), b[1].get(name), name)
    except (AssertionError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_an_error_at_any_call_leaves_each_parameter_before_or_after(seed, shared, on_device):
    case = Case(seed, on_device, shared=shared)
    case.run()
    for fail_at in random.Random(seed).sample(range(case.device.calls), min(case.device.calls, 4)):
        check_fault(seed, fail_at, on_device, shared)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("shared", [False, True])
def test_errors_at_any_call_of_many_seeds(shared, on_device):
    for seed in range(300):
        case = Case(seed, on_device, shared=shared)
        case.run()
        for fail_at in range(0, case.device.calls, max(1, case.device.calls // 20)):
            check_fault(seed, fail_at, on_device, shared)


def test_code_of_the_optimizer_itself_that_raises_in_any_chunk(on_device):
    """Its own chunk is undone, though it had spoilt parameter and state; chunks before it are stored."""
    undone = done = 0
    for seed in range(60):
        r = random.Random(seed)
        params = make_params(shapes=SHAPES)
        device = on_device(SimulatedDevice(seed))
        budget = r.choice((1, 10_000, 20_000, None))
        optimizer = CPUOffloadOptimizer(SignDescent(params), budget, per_parameter=True)
        for step in range(r.randrange(3)):
            set_grads(params, step)
            optimizer.step()
            device.settle()
        set_grads(params, 7)
        grads, before = [p.grad for p in params], snapshot(optimizer, params)
        bad = r.randrange(len(params))
        optimizer.inner.fail_at = params[bad].numel()
        with pytest.raises(ArithmeticError, match="told to fail"):
            optimizer.step()
        optimizer.inner.fail_at = None
        device.settle()
        assert all(p.grad is g for p, g in zip(params, grads, strict=True))
        assert not optimizer.strategy.torn and not device.live_bytes
        after = snapshot(optimizer, params)
        right = stepped_from(before, 7, optimizer.param_groups[0]["step"] - 1)
        for i, (old, new, other) in enumerate(zip(before, after, right, strict=True)):
            assert same(new, old) or (i != bad and same(new, other)), f"seed {seed}: parameter {i} is torn"
            undone += same(new, old)
            done += same(new, other)
        optimizer.step()
        device.settle()
        for new, other in zip(
            snapshot(optimizer, params),
            stepped_from(after, 7, optimizer.param_groups[0]["step"] - 1),
            strict=True,
        ):
            assert same(new, other), f"seed {seed}: the next step is wrong"
    assert undone > 60 and done > 60, "both outcomes were seen"


def stepped_from(before, step, count):
    """What a plain SignDescent makes of that state, `count` steps into its life."""
    params = [torch.nn.Parameter(value.clone()) for value, _ in before]
    plain = SignDescent(params)
    plain.param_groups[0]["step"] = count
    for p, (_, state) in zip(params, before, strict=True):
        plain.state[p] = {k: v.clone() for k, v in state.items()}
    set_grads(params, step)
    plain.step()
    return snapshot(plain, params)


def test_an_export_waits_for_the_last_store(on_device):
    params = make_params()
    device = on_device(SimulatedDevice(1, style="late"))
    optimizer = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), 20_000)
    set_grads(params, 0)
    optimizer.step()
    assert any(device.queues.values()), "the schedule left nothing to wait for"
    saved = optimizer.state_dict()
    reference = make_params()
    plain = FusedAdam(reference, lr=0.1)
    set_grads(reference, 0)
    plain.step()
    for i, state in plain.state_dict()["state"].items():
        for name, value in state.items():
            assert_same_values(saved["state"][i][name], value, name)


@pytest.mark.parametrize("name", ["fused_adam", "adamw"])
def test_a_step_without_gradients_or_skipped_by_found_inf_moves_nothing(name, on_device):
    params = make_params()
    device = on_device(SimulatedDevice(2))
    inner = FusedAdam(params) if name == "fused_adam" else torch.optim.AdamW(params, fused=True)
    optimizer = CPUOffloadOptimizer(inner, 20_000)
    set_grads(params, 0)
    optimizer.step()
    device.settle()
    calls, before = device.calls, snapshot(optimizer, params)
    optimizer.found_inf = torch.ones(())
    set_grads(params, 1)
    optimizer.step()
    del optimizer.found_inf
    for p in params:
        p.grad = None
    optimizer.step()
    assert device.calls == calls
    assert all(same(a, b) for a, b in zip(before, snapshot(optimizer, params), strict=True))


def test_a_checkpoint_moves_nothing_to_the_device(on_device):
    for make in MAKERS.values():
        params = make_params()
        device = on_device(SimulatedDevice(3))
        optimizer = CPUOffloadOptimizer(make(params), 50_000)
        set_grads(params, 0)
        optimizer.step()
        device.settle()
        calls = device.calls
        optimizer.load_state_dict(optimizer.state_dict())
        assert device.calls == calls


def test_the_first_step_of_whole_parameters_keeps_the_bound(on_device):
    """State that the optimizer itself makes on the device is counted by its storages."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class LiveState(TorchDispatchMode):
        """Peak bytes of param-sized tensors that outlive the operation which made them."""

        def __init__(self):
            super().__init__()
            self.alive, self.peak = {}, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            import weakref

            out = func(*args, **(kwargs or {}))
            if func._overloadpacket.__name__ in ("zeros_like", "clone"):
                key = id(out)
                self.alive[key] = out.numel() * out.element_size()
                weakref.finalize(out, self.alive.pop, key, None)
                self.peak = max(self.peak, sum(self.alive.values()))
            return out

    params = make_params(shapes=[(1000,)] * 20)
    on_device(SimulatedDevice(4))
    budget = 4 * 3 * 1024 * 4
    optimizer = CPUOffloadOptimizer(torch.optim.AdamW(params, foreach=False), budget)
    set_grads(params, 0)
    with LiveState() as live:
        optimizer.step()
    assert 0 < live.peak <= budget
    everything = CPUOffloadOptimizer(torch.optim.AdamW(make_params(shapes=[(1000,)] * 20), foreach=False))
    set_grads([p for g in everything.param_groups for p in g["params"]], 0)
    with LiveState() as control:
        everything.step()
    assert control.peak > budget
