"""The thread that drives the host's share: it waits, it can be stopped, its error comes back once, and it ends."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from statestream.device.worker import Worker


def threads():
    return [t for t in threading.enumerate() if t.name == "statestream host share"]


def test_it_waits_for_every_event_that_the_flow_yields_and_ends_with_it():
    waited, done = [], []

    def flow():
        for event in ("a", None, "b"):
            yield event
            done.append((event, list(waited), threading.current_thread().name))

    Worker(flow(), waited.append).result()
    assert done == [
        ("a", ["a"], "statestream host share"),
        (None, ["a"], "statestream host share"),
        ("b", ["a", "b"], "statestream host share"),
    ]
    assert not threads()


@pytest.mark.parametrize("where", ["flow", "synchronize"])
def test_its_error_comes_back_as_it_was_raised_and_once(where):
    error, cleaned = ArithmeticError("of the worker"), []

    def flow():
        try:
            yield "event"
            raise error
        finally:
            cleaned.append(True)

    def synchronize(_):
        if where == "synchronize":
            raise error

    worker = Worker(flow(), synchronize)
    with pytest.raises(ArithmeticError) as caught:
        worker.result()
    assert caught.value is error and cleaned
    worker.result()
    worker.stop()
    assert not threads()


def test_it_stops_where_it_next_yields():
    steps, entered, go_on = [], threading.Event(), threading.Event()

    def flow():
        for number in range(10):
            yield None
            steps.append(number)
            entered.set()
            go_on.wait(10)

    worker = Worker(flow(), lambda _: None)
    assert entered.wait(10)
    stopper = threading.Thread(target=worker.stop)
    stopper.start()
    time.sleep(0.05)
    assert stopper.is_alive(), "stop() returned while the flow was in the middle of something"
    go_on.set()
    stopper.join(10)
    assert steps == [0] and not threads()


def test_a_stopped_flow_waits_for_no_event_any_more():
    waited, entered, go_on = [], threading.Event(), threading.Event()

    def flow():
        entered.set()
        go_on.wait(10)
        yield "event"

    worker = Worker(flow(), waited.append)
    assert entered.wait(10)
    threading.Timer(0.05, go_on.set).start()
    worker.stop()
    assert not waited


@pytest.mark.parametrize("inference", [False, True])
def test_it_runs_in_the_callers_modes_and_without_autograd(inference):
    seen = []

    def flow():
        yield None
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    with torch.inference_mode(inference):
        Worker(flow(), lambda _: None).result()
    assert seen == [(inference, False)]
