"""The staged copies of exports and loads: right under every order that the events allow, for values of every form.

The queues of a GPU are simulated: work is held back and done in any order that the queues and the events between them
permit, each schedule drawn from a seed. Tensors are in host memory; what is under test is the order alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from statestream.checkpoint import transfer
from statestream.checkpoint.transfer import Exporter, Loader
from statestream.formats import scale_count
from statestream.state.stored import Stored

BYTES = 4096  # two halves of 512 elements
SIZES = [1, 511, 512, 513, 1024, 5000, 3]


class LateQueues:
    """Two queues whose work is done as late, and in as odd an order, as the events allow."""

    def __init__(self, seed: int, forget: Callable[[str, object], bool] | None = None):
        self.random = random.Random(seed)
        self.pending: dict[str, list[tuple[str, object]]] = {transfer.COMPUTE: [], transfer.COPY: []}
        self.done: set[int] = set()
        self.events = 0
        self.forget = forget or (lambda queue, event: False)
        self.log: list[str] = []
        self.taken = 0

    def take(self, buffer):
        """The caller's queue may still be at work on memory that is new to it; the copier is made to wait."""
        self.taken += 1
        self.run(transfer.COMPUTE, lambda: buffer.fill_(torch.nan))
        self.wait(transfer.COPY, self.record(transfer.COMPUTE))

    def run(self, queue, work):
        self.log.append(queue)
        self.pending[queue].append(("work", work))
        while self.random.random() < 0.4 and self._advance():
            pass

    def record(self, queue):
        self.events += 1
        self.pending[queue].append(("event", self.events))
        return self.events

    def wait(self, queue, event):
        if event is not None and not self.forget(queue, event):
            self.pending[queue].append(("wait", event))

    def finish(self):
        while self._advance():
            pass
        assert not any(self.pending.values()), "the queues wait for each other"

    def _advance(self) -> bool:
        ready = [
            queue
            for queue, entries in self.pending.items()
            if entries and (entries[0][0] != "wait" or entries[0][1] in self.done)
        ]
        if not ready:
            return False
        kind, what = self.pending[self.random.choice(ready)].pop(0)
        if kind == "work":
            what()
        elif kind == "event":
            self.done.add(what)
        return True


def late(monkeypatch, seed: int, forget=None) -> LateQueues:
    """Every copy is one between a GPU and the host, and these are the GPU's queues."""
    queues = LateQueues(seed, forget)
    monkeypatch.setattr(transfer, "_queues_for", lambda tensor: queues)
    monkeypatch.setattr(transfer, "_queue_between", lambda source, target: transfer.COPY)
    return queues


def values_of_sizes() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator) for n in SIZES]


def empty_state(like: torch.Tensor, dtype: torch.dtype) -> Stored:
    scaled = dtype in (torch.float16, torch.uint8)
    scale = torch.full((scale_count(like.numel()),), torch.nan) if scaled else None
    return Stored(torch.empty_like(like, dtype=dtype).fill_(126), scale, root=dtype is torch.uint8)


def stored(values: torch.Tensor, dtype: torch.dtype) -> Stored:
    """As one call stores it: of blocks with scales of their own, a slice of another length would have others."""
    state = empty_state(values, dtype)
    state.encode(values.abs() if state.root else values)
    return state


def export(sources: list[Stored]) -> list[torch.Tensor]:
    hosts = [torch.full((source.local.numel(),), torch.inf) for source in sources]
    with Exporter(BYTES) as exporter:
        for source, host in zip(sources, hosts, strict=True):
            exporter.copy(source, host)
    return hosts


def load(values: list[torch.Tensor], dtype: torch.dtype) -> list[Stored]:
    targets = [empty_state(value, dtype) for value in values]
    with Loader(BYTES) as loader:
        for value, target in zip(values, targets, strict=True):
            loader.copy(value, target)
    return targets


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_dtype
@pytest.mark.parametrize("seed", range(100))
def test_an_export_is_right_in_every_order(monkeypatch, seed, dtype):
    late(monkeypatch, seed)
    sources = [stored(values, dtype) for values in values_of_sizes()]
    for host, source in zip(export(sources), sources, strict=True):
        assert torch.equal(host, source.values())


@each_dtype
@pytest.mark.parametrize("seed", range(100))
def test_a_load_is_right_in_every_order(monkeypatch, seed, dtype):
    late(monkeypatch, seed)
    values = [v.abs() for v in values_of_sizes()]
    for target, value in zip(load(values, dtype), values, strict=True):
        whole = stored(value, dtype)
        assert torch.equal(target.local, whole.local)
        assert whole.scale is None or torch.equal(target.scale, whole.scale)


@pytest.mark.parametrize("seed", range(20))
def test_states_of_every_dtype_in_one_export_and_one_load(monkeypatch, seed):
    """What is copied as it is lies in the copy queue between the copies of what is staged."""
    queues = late(monkeypatch, seed)
    values = [v.abs() for v in values_of_sizes()]
    dtypes = [DTYPES[i % len(DTYPES)] for i in range(len(values))]
    sources = [stored(v, dtype) for v, dtype in zip(values, dtypes, strict=True)]
    for host, source in zip(export(sources), sources, strict=True):
        assert torch.equal(host, source.values())
    targets = [empty_state(v, dtype) for v, dtype in zip(values, dtypes, strict=True)]
    with Loader(BYTES) as loader:
        for value, target in zip(values, targets, strict=True):
            loader.copy(value, target)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source.local, target.local)
    assert set(queues.log) == {transfer.COMPUTE, transfer.COPY}
    assert queues.taken == 2, "staging was used before work on the same memory was over"


def test_what_is_copied_as_it_is_does_not_wait_for_decodes(monkeypatch):
    queues = late(monkeypatch, 0)
    values = values_of_sizes()
    export([stored(value, torch.float32) for value in values])
    load(values, torch.float32)
    assert queues.log == [transfer.COPY] * 2 * len(values)


@pytest.mark.parametrize("direction", ["export", "load"])
@pytest.mark.parametrize("queue", [transfer.COMPUTE, transfer.COPY])
def test_each_wait_is_needed(monkeypatch, direction, queue):
    """The control: with one queue's waits forgotten some order gives wrong values."""
    wrong = 0
    values = values_of_sizes()
    expected = [value.bfloat16().float() for value in values]
    for seed in range(40):
        with monkeypatch.context() as patch:
            late(patch, seed, forget=lambda waiting, event: waiting == queue)
            if direction == "export":
                found = export([stored(value, torch.bfloat16) for value in values])
            else:
                found = [state.local.float() for state in load(values, torch.bfloat16)]
        wrong += not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert wrong > 0


@st.composite
def strided(draw):
    """A tensor of up to four dimensions, permuted, perhaps stepped through or expanded."""
    sizes = draw(st.lists(st.integers(1, 7), min_size=0, max_size=4))
    steps = [draw(st.integers(1, 3)) for _ in sizes]
    base = torch.arange(float(torch.Size([a * b for a, b in zip(sizes, steps, strict=True)]).numel()))
    base = base.reshape([a * b for a, b in zip(sizes, steps, strict=True)])
    view = base[tuple(slice(None, None, step) for step in steps)]
    view = view.permute(draw(st.permutations(range(len(sizes)))))
    if view.dim() and draw(st.booleans()):
        view = view.narrow(0, 0, 1).expand(draw(st.integers(1, 5)), *view.shape[1:])
    return view


@given(strided(), st.data())
@settings(deadline=None)
def test_any_run_of_elements_is_gathered_from_any_strides(source, data):
    begin = data.draw(st.integers(0, source.numel() - 1))
    end = data.draw(st.integers(begin + 1, source.numel()))
    out = torch.full((end - begin,), torch.inf)
    transfer._gather(source, begin, out)
    assert torch.equal(out, source.reshape(-1)[begin:end])


@given(strided(), st.permutations(range(4)), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
@settings(deadline=None)
def test_a_load_puts_each_element_at_its_index_whatever_the_strides_on_either_side(values, order, dtype):
    values = values.to(dtype)
    order = [d for d in order if d < values.dim()]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    for dtype_of_state in (torch.float32, torch.bfloat16):
        state = torch.empty([values.shape[d] for d in order], dtype=dtype_of_state).permute(inverse)
        with Loader(transfer.LEAST_STAGING_BYTES) as loader:
            loader.copy(values, Stored(state))
        assert torch.equal(state, values.float().to(dtype_of_state))


def test_a_load_of_remainders_keeps_all_bits_through_other_strides():
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).reshape(256, 256)
    state = torch.empty(256, 256, dtype=torch.int16)
    with Loader(transfer.LEAST_STAGING_BYTES) as loader:
        loader.copy(bits.t(), Stored(state))
    assert torch.equal(state, bits.t())


# ---- the queues of a GPU that is not there ----


class Streams:
    """torch.cuda's streams as notes of what is asked of them."""

    def __init__(self, monkeypatch):
        self.asked: list[tuple[str, str]] = []
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.stream(f"copier of {device}"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream(f"compute of {device}"))

    def stream(self, name):
        note = self.asked.append
        return SimpleNamespace(
            name=name,
            synchronize=lambda: note((name, "synchronize")),
            wait_stream=lambda other: note((name, f"waits for {other.name}")),
        )


GPU = torch.device("cuda:0")


def test_the_copier_waits_for_what_was_queued_before_it(monkeypatch):
    """Before it copies a state, and before it uses memory that is new."""
    streams = Streams(monkeypatch)
    queues = transfer._CudaQueues(GPU)
    queues.take(torch.empty(1))
    assert streams.asked == [("copier of cuda:0", "waits for compute of cuda:0")] * 2


def test_the_end_of_staged_copies_is_that_of_both_queues(monkeypatch):
    streams = Streams(monkeypatch)
    queues = transfer._CudaQueues(GPU)
    streams.asked.clear()
    queues.finish()
    assert sorted(streams.asked) == [(f"{what} of cuda:0", "synchronize") for what in ("compute", "copier")]


def test_leaving_waits_for_each_device_that_was_queued_on(monkeypatch):
    streams = Streams(monkeypatch)
    monkeypatch.setattr(transfer, "is_fake", lambda tensor: False)
    with Exporter(BYTES) as exporter:
        for device in (GPU, GPU, torch.device("cuda:1"), torch.device("cpu")):
            exporter.queues(SimpleNamespace(device=device))
        streams.asked.clear()
    ends = [(f"{queue} of cuda:{i}", "synchronize") for queue in ("compute", "copier") for i in (0, 1)]
    assert sorted(streams.asked) == ends


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("saved", [torch.float16, torch.float32])
def test_a_load_takes_all_its_memory_before_it_writes(stored, saved, strided):
    state = Stored(torch.zeros(20, 30, dtype=stored), torch.ones(3) if stored is torch.float16 else None)
    values = torch.ones(30, 20, dtype=saved).t() if strided else torch.ones(20, 30, dtype=saved)
    with Loader(BYTES) as loader:
        loader.prepare(values, state)
        taken = loader.staging_taken
        loader.copy(values, state)
        assert loader.staging_taken == taken


@pytest.mark.parametrize("staging", [2048, 3000, 5000, 6144])
def test_slices_of_scaled_state_begin_on_block_edges_whatever_the_staging(staging):
    state = Stored(torch.zeros(3000, dtype=torch.float16), torch.ones(scale_count(3000)))
    values = torch.arange(3000, dtype=torch.float64) % 32
    with Loader(staging) as loader:
        loader.copy(values, state)
    assert torch.equal(state.values().double(), values)
