"""Runs a kernel block by block, the threads of a block as the lanes of numpy arrays.

Lanes that stand at the same instruction run together; of several groups the one that is furthest
behind goes next, so that lanes which parted at a branch meet again after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache

import numpy as np

from .exact import denormals_are_kept
from .isa import compile_instruction
from .memory import Access, Fault, Memory
from .parse import Kernel, PtxError

__all__ = ["ALL", "Block", "launch"]

ALL = slice(None)
"""Every lane of the block: numpy then works without index arrays."""

Lanes = slice | np.ndarray

_STEP_LIMIT = 500_000


class Block:
    """The state of one block while it runs."""

    def __init__(self, kernel: Kernel, index: int, grid: int, threads: int, params: Memory, memory: Memory):
        self.index, self.threads = index, threads
        self.epoch = 0
        self.thread_numbers = np.arange(threads, dtype=np.int64) + index * threads
        shared = Memory()
        for name, variable in kernel.shared.items():
            shared.add(np.zeros(variable.size, np.uint8), name, base=variable.address, written=False)
        self.spaces = {"global": memory, "shared": shared, "param": params}
        self.registers = {
            name: np.zeros(threads, bool if bits == 1 else f"u{bits // 8}") for name, bits in kernel.registers.items()
        }
        # Which lanes have a value in each register; True once all have.
        self._written: dict[str, np.ndarray | bool] = {}
        lane = np.arange(threads, dtype=np.uint32)
        self._special = {
            "%tid.x": lane,
            "%laneid": lane % 32,
            "%ntid.x": np.full(threads, threads, np.uint32),
            "%ctaid.x": np.full(threads, index, np.uint32),
            "%nctaid.x": np.full(threads, grid, np.uint32),
        }

    def special(self, name: str, lanes: Lanes) -> np.ndarray:
        if name not in self._special:
            raise PtxError(f"unknown special register {name}")
        return self._special[name][lanes]

    def read(self, name: str, lanes: Lanes) -> np.ndarray:
        """The bits of a register, as an unsigned integer or bool."""
        written = self._written.get(name, False)
        if written is not True and (written is False or not written[lanes].all()):
            raise Fault(f"reads register {name} before it is written")
        return self.registers[name][lanes]

    def write(self, name: str, lanes: Lanes, bits: np.ndarray) -> None:
        self.registers[name][lanes] = bits
        if isinstance(lanes, slice):
            self._written[name] = True
        elif (written := self._written.get(name, False)) is not True:
            if written is False:
                written = self._written[name] = np.zeros(self.threads, bool)
            written[lanes] = True
            if written.all():
                self._written[name] = True

    def access(self, lanes: Lanes, read_only_path: bool = False) -> Access:
        return Access(self.thread_numbers[lanes], self.index, self.epoch, read_only_path)

    def _merge(self, a: Lanes, b: Lanes) -> Lanes:
        lanes = np.sort(np.concatenate([a, b]))
        return ALL if lanes.size == self.threads else lanes

    def choose(self, lanes: Lanes, chosen: np.ndarray) -> Lanes:
        """Those of `lanes` for which `chosen` is true."""
        if chosen.all():
            return lanes
        return np.flatnonzero(chosen) if isinstance(lanes, slice) else lanes[chosen]

    def run(self, program: list, counts: Counter) -> None:
        """From the first instruction until every lane has returned."""
        groups: dict[int, Lanes] = {0: ALL}
        waiting: dict[int, Lanes] = {}
        steps = 0
        while groups or waiting:
            if not groups:
                groups = self._pass_barrier(waiting)
            at = min(groups)
            lanes = groups.pop(at)
            behind_of = min(groups, default=-1)
            while True:
                steps += 1
                if steps > _STEP_LIMIT:
                    raise Fault(f"no end after {_STEP_LIMIT} steps")
                step, opcode, text = program[at]
                counts[opcode] += self.threads if isinstance(lanes, slice) else lanes.size
                try:
                    moved = step(self, lanes)
                except (Fault, PtxError) as error:
                    raise type(error)(f"{error}\n  block {self.index}: {text}") from None
                at += 1
                if moved is not None:
                    self._regroup(moved, at, groups, waiting)
                    break
                if at == behind_of:
                    groups[at] = self._merge(groups[at], lanes)
                    break

    def _regroup(self, moved: dict, following: int, groups: dict, waiting: dict) -> None:
        """Puts lanes where a branch, a return or a barrier sent them."""
        for where, lanes in moved.items():
            if where == "return" or (not isinstance(lanes, slice) and not lanes.size):
                continue
            into, at = (waiting, following) if where == "barrier" else (groups, where)
            if where == "next":
                at = following
            into[at] = self._merge(into[at], lanes) if at in into else lanes

    def _pass_barrier(self, waiting: dict[int, Lanes]) -> dict[int, Lanes]:
        if len(waiting) > 1:
            raise Fault(f"block {self.index}: its threads wait at {len(waiting)} different barriers")
        self.epoch += 1
        groups = dict(waiting)
        waiting.clear()
        return groups


def launch(
    kernel: Kernel,
    *,
    grid: int,
    block: int,
    params: bytes,
    memory: Memory,
    order: Iterable[int] | None = None,
) -> Counter:
    """Runs a one-dimensional launch to its end; how many lanes ran each opcode.

    `params` are the kernel's parameters as the launcher lays them out. `order` is the blocks that run
    and their order, by default all of them. Raises Fault for what the kernel does wrong and PtxError for an instruction
    that is not known; both name the block and the instruction.
    """
    if not denormals_are_kept():
        raise RuntimeError("this process flushes denormals to zero: numpy would compute other bits")
    if len(params) != kernel.param_bytes:
        raise ValueError(f"{kernel.name} takes {kernel.param_bytes} bytes of parameters, not {len(params)}")
    if kernel.max_threads is not None and block > kernel.max_threads:
        raise ValueError(f"{kernel.name} takes blocks of at most {kernel.max_threads} threads, not {block}")
    blocks = range(grid) if order is None else list(order)
    if len(set(blocks)) != len(blocks) or not all(0 <= b < grid for b in blocks):
        raise ValueError(f"order must name some of {grid} blocks, none twice")
    param_space = Memory()
    for name, variable in kernel.params.items():
        data = np.frombuffer(params, np.uint8)[variable.offset : variable.offset + variable.size]
        param_space.add(data, name, base=variable.address, writable=False)
    counts: Counter = Counter()
    memory.begin_launch()
    with np.errstate(all="ignore"):
        for index in blocks:
            Block(kernel, index, grid, block, param_space, memory).run(_program(kernel), counts)
    return counts


@cache
def _program(kernel: Kernel) -> list:
    """(step, opcode, text) of each instruction."""
    program = [(compile_instruction(kernel, i), i.opcode, i.text) for i in kernel.instructions]
    return [*program, (_off_the_end, "", "end of the kernel")]


def _off_the_end(block: Block, lanes: Lanes):
    raise Fault("runs past the end of the kernel")
