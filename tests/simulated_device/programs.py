"""Random programs for the stream: state of several kinds, cut by a random plan, updated by a toy optimizer; a part of
it by the host, if the program is shared.

The toy has what makes Adam hard to stream: two kinds of state that must be updated together with a parameter,
units that are cut over chunks, units that are stepped whole, missing gradients, errors in the middle. Its
arithmetic is on bytes, wrapping, and different for every kind and step, so that any byte that is lost, stale,
updated twice or read early shows in the end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import ModuleType

import torch
from statestream.offload.host.arena import Arena, Bank
from statestream.offload.host.layout import Layout
from statestream.streaming import host_pipeline as real_host_stream
from statestream.streaming import pipeline as real_stream
from statestream.streaming.host_pipeline import Passage
from statestream.streaming.pipeline import Stage
from statestream.streaming.plan import Piece, Unit, make_plan
from statestream.streaming.share import cut_at, device_units, host_chunks

from .device import Hazard, InjectedFault, SimulatedDevice

KINDS = ("first", "second")
GRAIN = 16  # bytes of one grain of one kind


@dataclass
class Toy:
    """A stepper. Parameters hold one byte for every byte of the first kind of state."""

    device: SimulatedDevice
    layout: Layout
    units: list[Unit]
    params: list[torch.Tensor]
    active: set[int]
    split_launches: bool
    fail_launch: int | None = None
    launched: set[tuple[int, int]] = field(default_factory=set)
    lost: list[int] = field(default_factory=list)
    launches: int = 0

    def step(self, stage, ring):
        self._launch(stage, ring, [p for p in stage.chunk.pieces if p.unit in self.active])

    def keeps(self, stage):
        return any((p.unit, p.first) in self.launched for p in stage.chunk.pieces)

    def begun(self, stage):
        started = {unit for unit, _ in self.launched}
        return any(p.unit in started and (p.unit, p.first) not in self.launched for p in stage.chunk.pieces)

    def finish(self, stage, ring):
        started = {unit for unit, _ in self.launched}
        rest = [p for p in stage.chunk.pieces if p.unit in started and (p.unit, p.first) not in self.launched]
        self._launch(stage, ring, rest)

    def torn(self, stages, error):
        self.lost.extend(p.unit for stage in stages for p in stage.chunk.pieces)

    def _launch(self, stage, ring, pieces):
        for group in [[p] for p in pieces] if self.split_launches else [pieces]:
            if not group:
                continue
            self.launches += 1
            if self.launches - 1 == self.fail_launch:
                raise InjectedFault("launch")
            self.device.launch(self._kernel, stage.chunk, ring, group)
            self.launched.update((p.unit, p.first) for p in group)

    def _kernel(self, chunk, ring, pieces):
        for piece in pieces:
            begin, n = self.span(piece)
            param = self.params[piece.unit][begin : begin + n]
            if not n:
                continue
            views = []
            for kind in range(len(KINDS)):
                at = self.layout.place(chunk, piece, kind)
                has = self.units[piece.unit].sizes[kind] > 0
                if has:
                    self.device.check(ring, at, n)
                views.append(ring[at : at + n] if has else None)
            update(param, *views)

    def span(self, piece):
        """First byte and number of bytes of a piece of a parameter."""
        # A unit that is stepped whole is one grain, however large.
        size = self.params[piece.unit].numel()
        grain = GRAIN if self.units[piece.unit].grains > 1 else max(GRAIN, size)
        begin = min(piece.first * grain, size)
        return begin, min(piece.last * grain, size) - begin


@dataclass
class HostToy:
    """A host stepper that works together with a Toy."""

    toy: Toy
    done: set[tuple[int, int]] = field(default_factory=set)

    def down(self, chunk):
        waiting = [(piece, at) for piece, at in chunk if (piece.unit, piece.first) not in self.done]
        return [passage for piece, at in waiting for passage in self._passage(piece, at)]

    def up(self, chunk):
        done = [(piece, at) for piece, at in chunk if (piece.unit, piece.first) in self.done]
        return [passage for piece, at in done for passage in self._passage(piece, at)]

    def step(self, chunk, slot):
        self._update(chunk, slot)

    def begun(self, chunk):
        return bool(self._rest(chunk))

    def finish(self, chunk, slot):
        self._update(self._rest(chunk), slot)

    def torn(self, chunks, error):
        self.toy.lost.extend(piece.unit for chunk in chunks for piece, _ in chunk)

    def _rest(self, chunk):
        started = {unit for unit, _ in self.toy.launched}
        return [(p, at) for p, at in chunk if p.unit in started and (p.unit, p.first) not in self.toy.launched]

    def _passage(self, piece, at):
        begin, n = self.toy.span(piece)
        return [Passage(self.toy.params[piece.unit], begin, at, n)] if n else []

    def _update(self, chunk, slot):
        for piece, at in chunk:
            _, n = self.toy.span(piece)
            if self.toy.split_launches:
                self.toy.device.work_on_host(f"host {piece}")
            self.toy.device.check(slot, at, n)
            bank = next(b for b in self.toy.layout.banks if b.first <= piece.unit < b.first + len(b.units))
            states = [
                arena.block[bank.start(kind, piece) :][:n] if self.toy.units[piece.unit].sizes[kind] else None
                for kind, arena in enumerate(bank.arenas)
            ]
            update(slot[at : at + n], *states)
            self.done.add((piece.unit, piece.first))
            self.toy.launched.add((piece.unit, piece.first))


def update(param, first, second):
    """The toy's rule: in place, and no step undoes or repeats another."""
    if first is not None:
        first.mul_(3).add_(param)
    if second is not None:
        second.mul_(5).add_(first if first is not None else param).add_(1)
        param.add_(second)
    param.mul_(7).add_(2 if first is None else first)


@dataclass
class Program:
    """A seed's whole case: units, budget, which gradients are missing in which step, where it fails."""

    seed: int
    steps: int = 2
    shared: bool = False
    """Whether the host has a share of each step."""

    def __post_init__(self):
        r = self.random = random.Random(self.seed)
        self.divisible = r.random() < 0.7
        self.grains = [r.choice((1, 1, 2, 3, 5, 9, 20)) for _ in range(r.randrange(1, 9))]
        # Local shards are no larger than what is planned, and may be empty.
        self.local = [r.choice((g * GRAIN, g * GRAIN, r.randrange(g * GRAIN + 1), 0)) for g in self.grains]
        self.kinds = [r.choice(((1, 1), (1, 1), (1, 0), (0, 0))) for _ in self.grains]
        split = r.randrange(len(self.grains) + 1)
        self.banks = [0] * split + [1] * (len(self.grains) - split)
        if split == 0:
            self.banks = [0] * len(self.grains)
        total = sum(g * GRAIN * sum(k) for g, k in zip(self.grains, self.kinds, strict=True))
        largest = max(
            GRAIN * sum(k) * (1 if self.divisible else g) for g, k in zip(self.grains, self.kinds, strict=True)
        )
        self.budget = r.choice(
            (1, max(largest, 1), r.randrange(1, total + 2), r.randrange(1, total + 2), total + 1, None)
        )
        self.allowed = max(largest, total if self.budget is None else self.budget)
        self.missing = [{u for u in range(len(self.grains)) if r.random() < 0.2} for _ in range(self.steps)]
        self.split_launches = r.random() < 0.5
        self.fraction = r.choice((0.25, 0.5, 0.5, 0.75, 1.0)) if self.shared else 0.0
        self.slots, self.room = r.randrange(1, 4), r.choice((1, 64, 200, 1000))

    def build(self, device):
        units = [
            Unit(tuple(g * GRAIN * k for k in kinds), g if self.divisible else 1, bank)
            for g, kinds, bank in zip(self.grains, self.kinds, self.banks, strict=True)
        ]
        self.cut = cut_at(units, self.fraction)
        plan = make_plan(device_units(units, self.cut), self.budget)
        banks = []
        for bank in sorted(set(self.banks)):
            members = [i for i, b in enumerate(self.banks) if b == bank]
            arenas = [
                Arena(
                    kind,
                    [-(-self.local[i] // GRAIN) * GRAIN * self.kinds[i][k] for i in members],
                    [units[i].sizes[k] // units[i].grains for i in members],
                    device.memory,
                )
                for k, kind in enumerate(KINDS)
            ]
            banks.append(Bank(members[0], members, arenas))
        return units, Layout(plan, units, banks)

    def fresh(self):
        """Parameters and state at the start, and the same again for the judge."""
        r = random.Random(self.seed + 1)

        def noise(n):
            return torch.tensor([r.randrange(256) for _ in range(n)], dtype=torch.uint8)

        params = [noise(n) for n in self.local]
        states = [[noise(n) if k else None for k in kinds] for n, kinds in zip(self.local, self.kinds, strict=True)]
        return params, states


def run_program(
    program: Program,
    fail_at: int | None = None,
    style: str | None = None,
    stream: ModuleType = real_stream,
    host_stream: ModuleType = real_host_stream,
) -> SimulatedDevice:
    """Runs a program and judges it; raises Hazard for whatever is wrong, naming the seed.

    `fail_at` injects an error at that call of the seam, counted over all steps.
    """
    device = SimulatedDevice(program.seed, program.allowed, fail_at, style)
    try:
        _run(program, device, stream, host_stream)
    except Hazard as hazard:
        raise Hazard(f"seed {program.seed}, fail_at {fail_at}, style {device.style}: {hazard}") from hazard
    return device


def _run(program, device, stream, host_stream):
    units, layout = program.build(device)
    grain_bytes = [GRAIN if u.grains > 1 else GRAIN * n for u, n in zip(units, program.grains, strict=True)]
    chunks = host_chunks(units, program.cut, grain_bytes, program.room) if program.shared else []
    slots = [device.memory.block(max([program.room, *grain_bytes])) for _ in range(program.slots)]
    params, states = program.fresh()
    expected_params = [p.clone() for p in params]
    expected = [[None if s is None else s.clone() for s in state] for state in states]
    _write_state(layout, states)
    done = [0] * len(units)
    last = None
    for number in range(program.steps):
        active = set(range(len(units))) - program.missing[number]
        stages = layout.stages(active if number or program.missing[number] else None)
        toy = Toy(device, layout, units, params, active, program.split_launches)
        if program.shared:
            weights = [p.clone() for p in expected_params]
            device.between_steps(lambda number=number, weights=weights: _forward(device, params, weights, number))
        waits = device.host_waits
        before = _units_seen(layout, chunks)
        if before != {u: units[u].grains for u in range(len(units))}:
            raise Hazard(f"the plan does not hold every grain once: {before}")
        mine = [tuple((p, at) for p, at in chunk if p.unit in active) for chunk in chunks]
        mine = [chunk for chunk in mine if chunk]
        host = host_stream.HostShare(device, slots, mine, HostToy(toy)) if mine else None
        try:
            last = stream.run(device, layout.plan.ring_bytes, stages, toy, host)
            stepped = active
            if device.host_waits != waits + bool(mine):
                raise Hazard("the host waited inside a step")
        except InjectedFault as fault:
            if str(fault) != device.log[device.fail_at]:
                raise Hazard(f"a different error came back: {fault}") from fault
            if toy.lost:
                raise Hazard(f"units {toy.lost} were given up") from fault
            last = None
            stepped = {unit for unit, _ in toy.launched}
        for unit in stepped:
            done[unit] += 1
            update(expected_params[unit], *expected[unit])
        if last is None and not stages:
            # The host's work on state is done once the step returns; weights follow in the order of the queues.
            _judge_state(program, layout, expected, device)
        if last is not None:
            # What an export does: wait for the last store, then read host memory at once.
            device.synchronize(last)
            _judge_state(program, layout, expected, device)
        if device.live_bytes:
            raise Hazard(f"{device.live_bytes} bytes are still on the device after a step")
    device.settle()
    _judge_state(program, layout, expected, device)
    for unit, (param, right) in enumerate(zip(params, expected_params, strict=True)):
        if not torch.equal(param, right):
            raise Hazard(f"parameter of unit {unit} is wrong")


def _forward(device, params, expected, number):
    """Stands for what the compute queue does between steps: it reads every weight, of the step before and no later."""
    for unit, (param, right) in enumerate(zip(params, expected, strict=True)):
        device.check(param, 0, param.numel())
        if not torch.equal(param, right):
            raise Hazard(f"before step {number} the weight of unit {unit} is not that of the step before")


def _units_seen(layout, chunks):
    seen = {}
    for piece in [p for chunk in layout.plan.chunks for p in chunk.pieces] + [p for chunk in chunks for p, _ in chunk]:
        if seen.get(piece.unit, 0) != piece.first:
            raise Hazard(f"piece {piece} comes out of order")
        seen[piece.unit] = piece.last
    return seen


def _state_views(layout, unit):
    bank = next(b for b in layout.banks if b.first <= unit < b.first + len(b.units))
    whole = Piece(unit, 0, layout.units[unit].grains)
    for kind, arena in enumerate(bank.arenas):
        yield arena.block, bank.start(kind, whole)


def _write_state(layout, states):
    for unit, state in enumerate(states):
        for (block, at), values in zip(_state_views(layout, unit), state, strict=True):
            if values is not None:
                block[at : at + values.numel()] = values


def _judge_state(program, layout, expected, device):
    for unit, state in enumerate(expected):
        for (block, at), values in zip(_state_views(layout, unit), state, strict=True):
            if values is None:
                continue
            device.check(block, at, values.numel())
            if not torch.equal(block[at : at + values.numel()], values):
                raise Hazard(f"state of unit {unit} is wrong")


__all__ = ["GRAIN", "KINDS", "Program", "Stage", "Toy", "run_program", "update"]
