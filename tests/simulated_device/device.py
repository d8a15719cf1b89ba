"""A hostile stand-in for statestream.device.queues, on host memory.

Every call only queues work. Queued work runs as late, and in as odd an order, as the events allow: a schedule
is drawn from the seed. Copies arrive in parts with other queues' work in between. Memory is poisoned until data
has truly arrived in it, while a copy into it is under way, and after it was freed; reading poison is an error at
once. The allocator hands the same memory out again while the compute queue's earlier work on it still pends, as
torch's does. Live bytes are counted, and host waits.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from dataclasses import dataclass, field

import torch
from statestream.device.host_memory import HostMemory

POISON = 0xFF  # NaN in every float format

QUEUES = ("compute", "load", "store", "down", "up")


class Hazard(AssertionError):
    """The program under test did something that its events do not permit."""


class InjectedFault(RuntimeError):
    """The fault that a test asked for."""


class Event:
    def __init__(self, number: int, queue: str):
        self.number, self.queue, self.done = number, queue, False


@dataclass
class Work:
    """One piece of queued work: what it waits for, or what it does, in parts."""

    label: str
    parts: list = field(default_factory=list)
    waits_for: Event | None = None
    completes: Event | None = None


class SimulatedWorker:
    """Stands in for statestream.device.worker.Worker: the flow goes on whenever the schedule likes and its event is
    done."""

    def __init__(self, device: SimulatedDevice, flow):
        self.device, self.flow = device, flow
        self.waits_for: Event | None = None
        self.done = self.running = False
        self.error: BaseException | None = None

    @property
    def ready(self) -> bool:
        return not self.done and not self.running and (self.waits_for is None or self.waits_for.done)

    def go_on(self) -> None:
        self.running = True
        try:
            self.waits_for = next(self.flow)
        except StopIteration:
            self.done = True
        except BaseException as error:
            self.done, self.error = True, error
        finally:
            self.running = False

    def result(self) -> None:
        self.device.host_waits += 1
        while not self.done:
            if self.ready:
                self.go_on()
            else:
                self.device.run_until(self.waits_for)
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def stop(self) -> None:
        self.flow.close()
        self.done = True


class SimulatedDevice:
    """`budget` bounds the live bytes (None: any). `fail_at`: the n-th call of the seam (from 0) raises.

    `style` is how work is picked: "late" runs nothing before it must, and then only what must; "eager" runs
    all that may; the others run some, favouring queues by random weights.
    """

    STYLES = ("late", "eager", "random", "bursts")
    host_reaches_parameters = False

    def __init__(self, seed: int, budget: int | None = None, fail_at: int | None = None, style: str | None = None):
        self.random = random.Random(seed)
        self.style = style or self.random.choice(self.STYLES)
        self.weights = {q: self.random.choice((0.02, 0.2, 1.0, 1.0, 5.0)) for q in (*QUEUES, "worker")}
        self.queues: dict[str, deque[Work]] = {q: deque() for q in QUEUES}
        self.compute, self.load, self.store, self.down, self.up = QUEUES
        self.workers: list[SimulatedWorker] = []
        self.torch_device = torch.device("cpu")
        self.memory = HostMemory()
        self.budget, self.fail_at = budget, fail_at
        self.calls = self.host_waits = self.live_bytes = self.peak_bytes = 0
        self.log: list[str] = []
        self._events = 0
        self._valid: dict[int, torch.Tensor] = {}
        self._freed: list[torch.Tensor] = []

    # ---- the seam ----

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._call(f"allocate {nbytes}")
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self.budget is not None and self.live_bytes > self.budget:
            raise Hazard(f"{self.live_bytes} bytes of state are on the device, {self.budget} are allowed")
        reused = next((b for b in self._freed if b.numel() == nbytes), None)
        if reused is None:
            block = torch.full((nbytes,), POISON, dtype=torch.uint8)
            self._valid[block.data_ptr()] = torch.zeros(nbytes, dtype=torch.bool)
        else:
            self._freed = [b for b in self._freed if b is not reused]
            block = reused
        # Whatever the compute queue did with this memory before may still be on its way.
        self._push(self.compute, Work("earlier use of the memory", [lambda: self._poison(block, 0, nbytes)]))
        return block

    def free(self, block: torch.Tensor) -> None:
        self.live_bytes -= block.numel()
        self._push(self.compute, Work("free", [lambda: self._poison(block, 0, block.numel())]))
        self._freed.append(block)

    def record(self, queue: str) -> Event:
        self._call(f"record {queue}")
        self._events += 1
        event = Event(self._events, queue)
        self._push(queue, Work(f"event {event.number}", completes=event))
        return event

    def wait(self, queue: str, event: Event) -> None:
        self._call(f"{queue} waits for event {event.number} of {event.queue}")
        self._push(queue, Work(f"wait {event.number}", waits_for=event))

    def copy(self, queue, to, to_offset, source, offset, nbytes) -> None:
        self._call(f"{queue} copies {nbytes}: {offset} -> {to_offset}")
        for block, at in ((to, to_offset), (source, offset)):
            if at < 0 or at + nbytes > block.numel():
                raise Hazard(f"a copy of {nbytes} bytes at {at} leaves its block of {block.numel()}")
        cuts = sorted({0, nbytes, *(self.random.randrange(nbytes + 1) for _ in range(self.random.randrange(3)))})
        spans = [(a, b) for a, b in itertools.pairwise(cuts) if a < b]
        self.random.shuffle(spans)

        def begin():
            self.check(source, offset, nbytes)
            self._poison(to, to_offset, nbytes)

        def arrive(a, b):
            self.check(source, offset + a, b - a)
            to[to_offset + a : to_offset + b] = source[offset + a : offset + b]
            self._mark(to, to_offset + a, b - a)

        parts = [begin, *((lambda a=a, b=b: arrive(a, b)) for a, b in spans)]
        self._push(queue, Work(f"copy {nbytes}", parts))

    def launch(self, function, *args, **kwargs) -> None:
        self._call(f"launch {getattr(function, '__name__', function)}")
        self._push(self.compute, Work("kernel", [lambda: function(*args, **kwargs)]))

    def between_steps(self, function) -> None:
        """For tests: work of others on the compute queue, such as a forward pass."""
        self._push(self.compute, Work("between steps", [function]))

    def work_on_host(self, what: str) -> None:
        """For tests: a call that may be told to fail, on the host's side."""
        self._call(what)

    @contextlib.contextmanager
    def computing(self):
        """Torch operations cannot be put off here: they run now, as soon as the compute queue's own waits allow,
        and everything that they need not wait for stays late."""
        self._call("computing")
        self.run_until(self._marker(self.compute))
        yield

    def start(self, flow) -> SimulatedWorker:
        self._call("start")
        self.workers = [w for w in self.workers if not w.done]
        self.workers.append(SimulatedWorker(self, flow))
        return self.workers[-1]

    def synchronize(self, event: Event) -> None:
        self.host_waits += 1
        self.run_until(event)

    def drain(self) -> None:
        self._call("drain")
        self.host_waits += 1
        for queue in self.random.sample(QUEUES, len(QUEUES)):
            self.run_until(self._marker(queue))

    # ---- for tests ----

    def settle(self) -> None:
        """Runs all that is queued, without counting it as a host wait or a call."""
        while self._run_something():
            pass
        stuck = {q: work[0].label for q, work in self.queues.items() if work}
        if stuck:
            raise Hazard(f"deadlock: {stuck}")

    def check(self, block: torch.Tensor, offset: int, nbytes: int) -> None:
        """Raises Hazard if any of these bytes has not arrived, or was freed."""
        valid = self._valid.get(block.data_ptr())
        if valid is not None and not bool(valid[offset : offset + nbytes].all()):
            raise Hazard(f"{nbytes} bytes at {offset} were read before they arrived or after they were freed")

    # ---- machinery ----

    def _call(self, what: str) -> None:
        self.log.append(what)
        self.calls += 1
        if self.fail_at == self.calls - 1:
            raise InjectedFault(what)

    def _poison(self, block: torch.Tensor, offset: int, nbytes: int) -> None:
        block[offset : offset + nbytes] = POISON
        valid = self._validity(block)
        valid[offset : offset + nbytes] = False

    def _mark(self, block: torch.Tensor, offset: int, nbytes: int) -> None:
        self._validity(block)[offset : offset + nbytes] = True

    def _validity(self, block: torch.Tensor) -> torch.Tensor:
        valid = self._valid.get(block.data_ptr())
        if valid is None or valid.numel() != block.numel():  # another tensor had this address
            valid = self._valid[block.data_ptr()] = torch.ones(block.numel(), dtype=torch.bool)
        return valid

    def _marker(self, queue: str) -> Event:
        event = Event(0, queue)
        self.queues[queue].append(Work("marker", completes=event))
        return event

    def _push(self, queue: str, work: Work) -> None:
        self.queues[queue].append(work)
        if self.style == "eager":
            while self._run_something():
                pass
        elif self.style == "random":
            for _ in range(self.random.randrange(3)):
                self._run_something()
        elif self.style == "bursts" and self.random.random() < 0.1:
            for _ in range(self.random.randrange(40)):
                self._run_something()

    def _ready(self, queue: str) -> bool:
        work = self.queues[queue]
        return bool(work) and (work[0].waits_for is None or work[0].waits_for.done)

    def _run_something(self) -> bool:
        ready = [q for q in QUEUES if self._ready(q)]
        workers = [w for w in self.workers if w.ready]
        if workers:
            ready.append("worker")
        if not ready:
            return False
        chosen = self.random.choices(ready, [self.weights[q] for q in ready])[0]
        if chosen == "worker":
            (workers[0] if len(workers) == 1 else self.random.choice(workers)).go_on()
        else:
            self._run_part(chosen)
        return True

    def _run_part(self, queue: str) -> None:
        work = self.queues[queue][0]
        if work.parts:
            work.parts.pop(0)()
        if not work.parts:
            self.queues[queue].popleft()
            if work.completes is not None:
                work.completes.done = True

    def run_until(self, event: Event) -> None:
        while not event.done:
            if self.style == "late" or self.random.random() < 0.5:
                self._run_toward(event)
            elif not self._run_something():
                raise Hazard(f"deadlock: nothing can run and event {event.number} is not done")

    def _run_toward(self, event: Event) -> None:
        """One part of something that the event truly depends on."""
        queue, seen = event.queue, set()
        while not self._ready(queue):
            if queue in seen or not self.queues[queue]:
                raise Hazard(f"deadlock: event {event.number} cannot complete")
            seen.add(queue)
            queue = self.queues[queue][0].waits_for.queue
        self._run_part(queue)
