"""Branches, barriers, shuffles and reductions."""

from __future__ import annotations

import numpy as np

from ..memory import Fault
from ..operands import Source, destination, label
from ..parse import PtxError
from .opcodes import Code, Step, need_target, opcode


@opcode(r"bra(?:\.uni)?")
def _bra(code: Code) -> Step:
    code.expect(1)
    target = label(code.kernel, code.operands[0])
    return lambda block, lanes: {target: lanes}


@opcode(r"ret|exit")
def _ret(code: Code) -> Step:
    code.expect(0)
    return lambda block, lanes: {"return": lanes}


@opcode(r"trap")
def _trap(code: Code) -> Step:
    def run(block, lanes):
        raise Fault("trap")

    return run


@opcode(r"(?:bar|barrier)\.sync(?:\.aligned)?")
def _barrier(code: Code) -> Step:
    if code.operands != ("0",):
        raise PtxError("only the barrier of the whole block, 0")
    return lambda block, lanes: {"barrier": lanes}


@opcode(r"shfl\.sync\.(?P<mode>bfly|down|up|idx)\.b32")
def _shfl(code: Code, mode: str) -> Step:
    """Whole warps only: clamp 31 (up: 0), no segments, and every lane of the mask here."""
    code.expect(5)
    names = str(code.operands[0]).split("|")
    to = destination(code.kernel, names[0], "b32")
    valid = destination(code.kernel, names[1], "pred") if len(names) > 1 else None
    value, operand = code.source(1, "b32"), code.source(2, "u32")
    clamp, mask = code.source(3, "u32"), code.source(4, "u32")

    def run(block, lanes):
        lane_of, wanted = _lanes_of_mask(block, lanes, mask, "shfl")
        if (clamp(block, lanes) != (0 if mode == "up" else 31)).any():
            raise PtxError("shfl with segments")
        own, by = lane_of % 32, operand(block, lanes).astype(np.int64)
        source_lane = {"bfly": own ^ by, "down": own + by, "up": own - by, "idx": by & 31}[mode]
        inside = (source_lane >= 0) & (source_lane < 32)
        source_lane = np.where(inside, source_lane, own)
        if ((wanted.astype(np.int64) >> source_lane) & 1 == 0).any():
            raise Fault("shfl from a lane that its mask does not name")
        values = np.zeros(-(-block.threads // 32) * 32, np.uint32)
        values[lane_of] = value(block, lanes)
        to(block, lanes, values[lane_of - own + source_lane])
        if valid:
            valid(block, lanes, inside)

    return run


@opcode(r"redux\.sync\.max\.u32")
def _redux(code: Code) -> Step:
    """Every lane of the mask here, and one mask a warp."""
    need_target(code, 80)
    code.expect(3)
    to, value, mask = code.destination(0, "u32"), code.source(1, "u32"), code.source(2, "u32")

    def run(block, lanes):
        lane_of, wanted = _lanes_of_mask(block, lanes, mask, "redux")
        for warp in np.unique(lane_of // 32):
            if np.unique(wanted[lane_of // 32 == warp]).size > 1:
                raise PtxError("redux with several masks in a warp")
        largest = np.zeros(-(-block.threads // 32), np.uint32)
        np.maximum.at(largest, lane_of // 32, np.broadcast_to(value(block, lanes), lane_of.shape))
        to(block, lanes, largest[lane_of // 32])

    return run


def _lanes_of_mask(block, lanes, mask: Source, what: str) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the threads that are here and the mask of each; a Fault unless every lane of it is here."""
    lane_of = np.arange(block.threads)[lanes]
    here = np.zeros(-(-block.threads // 32) * 32, bool)
    here[lane_of] = True
    wanted = np.broadcast_to(mask(block, lanes), lane_of.shape)
    bits = (here.reshape(-1, 32) * (1 << np.arange(32))).sum(1).astype(np.uint32)
    if (wanted & ~bits[lane_of // 32]).any():
        raise Fault(f"{what} names a lane that is not here")
    if ((wanted >> (lane_of % 32).astype(np.uint32)) & 1 == 0).any():
        raise Fault(f"{what} by a lane that its mask does not name")
    return lane_of, wanted
