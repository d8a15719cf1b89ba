"""The timeline of a step: each chunk's load, update and store, once, in order, by the device's own events."""

from __future__ import annotations

import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from helpers.devices import Beyond
from statestream import CPUOffloadOptimizer, FusedAdam, Timeline
from statestream.device.queues import HostDevice

from .conftest import assert_same_training, make_params, set_grads, train

pytestmark = pytest.mark.filterwarnings("ignore:.*need more than step_chunk_bytes")

MAKERS = {
    "fused_adam": lambda params: FusedAdam(params, lr=0.1, master_weights=True, exp_avg_dtype="bf16"),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
}
BUDGET = 20_000


def recorded(name, steps=1):
    params = make_params(torch.bfloat16)
    optimizer = CPUOffloadOptimizer(MAKERS[name](params), BUDGET)
    train(optimizer, params, [0])  # the first step makes the state
    with Timeline(optimizer) as timeline:
        train(optimizer, params, range(1, 1 + steps))
    return params, optimizer, timeline


@pytest.mark.parametrize("name", MAKERS)
def test_every_chunk_is_loaded_updated_and_stored_once_and_in_order(name):
    _, optimizer, timeline = recorded(name)
    chunks = optimizer.strategy.store.plan.chunks
    assert len(chunks) > 3
    by_chunk = {(span.what, span.chunk): span for span in timeline.spans}
    assert len(by_chunk) == len(timeline.spans) == 3 * len(chunks)
    for number in range(len(chunks)):
        load, update, store = (by_chunk[what, number] for what in ("load", "update", "store"))
        assert 0 <= load.begin <= load.end <= update.begin <= update.end <= store.begin <= store.end
    loads = sum(span.nbytes for span in timeline.spans if span.what == "load")
    stores = sum(span.nbytes for span in timeline.spans if span.what == "store")
    assert loads == stores == optimizer.host_state_bytes


@pytest.mark.parametrize("name", MAKERS)
def test_recording_changes_nothing_and_ends_with_its_context(name):
    params, optimizer, _ = recorded(name)
    reference = make_params(torch.bfloat16)
    plain = MAKERS[name](reference)
    train(plain, reference, range(2))
    assert type(optimizer.strategy.device) is HostDevice
    train(optimizer, params, [2])
    train(plain, reference, [2])
    assert_same_training(params, optimizer, reference, plain)


class Queues:
    """Time of a device with three queues: copies at a rate each way, a launch a fixed time."""

    RATE, LAUNCH = 1e6, 2e-3

    def __init__(self):
        self.free_at = {"compute": 0.0, "load": 0.0, "store": 0.0}

    def mark(self, queue):
        return self.free_at[queue]

    def seconds(self, begin, end):
        return end - begin


class Clocked(HostDevice):
    """Does its work at once, and says when the queues would have."""

    compute, load, store = "compute", "load", "store"

    def __init__(self):
        super().__init__()
        self.clock = Queues()

    def record(self, queue):
        return self.clock.free_at[queue]

    def wait(self, queue, event):
        self.clock.free_at[queue] = max(self.clock.free_at[queue], event)

    def copy(self, queue, to, to_offset, source, offset, nbytes):
        super().copy(queue, to, to_offset, source, offset, nbytes)
        self.clock.free_at[queue] += nbytes / Queues.RATE

    def launch(self, function, *args, **kwargs):
        super().launch(function, *args, **kwargs)
        self.clock.free_at["compute"] += Queues.LAUNCH


def test_on_queues_of_their_own_loads_updates_and_stores_overlap(on_device):
    on_device(Clocked())
    _, optimizer, timeline = recorded("fused_adam")
    spans = {
        what: sorted((s for s in timeline.spans if s.what == what), key=lambda s: s.chunk) for what in ("load", "store")
    }
    for queue in spans.values():
        assert all(one.end <= next_.begin for one, next_ in pairwise(queue)), "one queue does one thing at a time"
    overlapping = [load.begin < store.end for load, store in zip(spans["load"][1:], spans["store"], strict=False)]
    assert all(overlapping)
    for span in timeline.spans:
        expected = Queues.LAUNCH if span.what == "update" else span.nbytes / Queues.RATE
        assert span.end - span.begin >= 0.999 * expected
    in_turn = sum(span.end - span.begin for span in timeline.spans)
    assert max(span.end for span in timeline.spans) < 0.7 * in_turn
    assert optimizer.host_state_bytes == sum(span.nbytes for span in spans["load"])


def test_the_picture_has_a_bar_for_each_span(tmp_path):
    import matplotlib.image

    _, _, timeline = recorded("fused_adam")
    timeline.save_png(tmp_path / "step.png")
    picture = matplotlib.image.imread(tmp_path / "step.png")[..., :3]
    colours = {tuple(round(float(c) * 255) for c in pixel) for pixel in picture.reshape(-1, 3)}
    for shade in ((0x2F, 0x6F, 0xAB), (0x7F, 0xB2, 0xDD), (0xE0, 0x8E, 0x45), (0x15, 0x80, 0x3D), (0x7C, 0xC4, 0x9A)):
        assert shade in colours


def test_what_cannot_be_recorded_is_said(tmp_path):
    _, optimizer, timeline = recorded("fused_adam")
    with pytest.raises(TypeError, match="FusedAdam"):
        Timeline(optimizer.inner)
    with Timeline(optimizer), pytest.raises(RuntimeError, match="already"):
        Timeline(optimizer).__enter__()
    with Timeline(optimizer) as empty:
        pass
    with pytest.raises(ValueError, match="no streamed step"):
        empty.save_png(tmp_path / "step.png")
    with pytest.raises(OSError):
        timeline.save_png(tmp_path / "no" / "step.png")


def test_an_error_in_a_step_ends_the_recording_too(on_device):
    class Failing(HostDevice):
        fails = False

        def launch(self, function, *args, **kwargs):
            if self.fails:
                raise RuntimeError("a fault")
            super().launch(function, *args, **kwargs)

    device = on_device(Failing())
    params = make_params()
    optimizer = CPUOffloadOptimizer(FusedAdam(params, lr=0.1), BUDGET)
    set_grads(params, 0)
    device.fails = True
    with pytest.raises(RuntimeError, match="a fault"), Timeline(optimizer):
        optimizer.step()
    assert optimizer.strategy.device is device
    device.fails = False
    optimizer.step()


def test_the_hosts_share_is_recorded_too(on_device, tmp_path):
    on_device(Beyond())
    params = make_params(torch.bfloat16)
    optimizer = CPUOffloadOptimizer(MAKERS["fused_adam"](params), BUDGET, cpu_fraction=0.5)
    train(optimizer, params, [0])
    with Timeline(optimizer) as timeline:
        train(optimizer, params, [1])
    moved = {what: sum(s.nbytes for s in timeline.spans if s.what == what) for what in ("gradients down", "weights up")}
    whole = sum(p.numel() * 2 for p in params)
    assert moved["gradients down"] == moved["weights up"] == pytest.approx(whole / 2, abs=1024)
    loads = sum(s.nbytes for s in timeline.spans if s.what == "load")
    assert loads == pytest.approx(optimizer.host_state_bytes / 2, abs=256 * 10)
    timeline.save_png(tmp_path / "step.png")
    assert type(optimizer.strategy.device) is Beyond


def test_a_step_that_is_timed_to_balance_its_shares_is_recorded(on_device):
    """Its marks are on the device's queues, which a GPU's clock takes and no other."""

    class Strict(HostDevice):
        host_reaches_parameters = False
        compute, load, store, down, up = object(), object(), object(), object(), object()

        def __init__(self):
            super().__init__()
            self.clock = SimpleNamespace(mark=self.mark, seconds=lambda begin, end: end - begin)

        def mark(self, queue):
            assert queue in (self.compute, self.load, self.store, self.down, self.up)
            return time.perf_counter()

    on_device(Strict())
    params = make_params(torch.bfloat16)
    optimizer = CPUOffloadOptimizer(MAKERS["fused_adam"](params), BUDGET, cpu_fraction="auto")
    with Timeline(optimizer) as timeline:
        train(optimizer, params, range(3))
    assert timeline.spans
