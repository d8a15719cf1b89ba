"""A wait that is left out is noticed: under some schedule bits differ, or the runtime reports what no GPU permits."""

from __future__ import annotations

import gc
from functools import cache
from zlib import crc32

import pytest
import torch

from tests.fake_runtime.on_it.waits import PROGRAMS, Place, left_out, places
from tests.fake_runtime.runtime import STYLES, lib

SEEDS = range(8)


@cache
def right(program: str) -> tuple[list[torch.Tensor], set[tuple[str, int]]]:
    """What it gives where nothing is late, and where it waits if all is."""
    lib.seed(0, STYLES.index("eager"))
    values = PROGRAMS[program]()
    lib.seed(0, STYLES.index("late"))
    with left_out(None) as seen:
        PROGRAMS[program]()
    lib.settle()
    return values, seen


def goes_wrong(program: str, place: Place | None, seed: int, style: str) -> str | None:
    """What shows that a program went wrong; None where nothing does."""
    want, _ = right(program)
    lib.seed(seed, STYLES.index(style))
    try:
        with left_out(place):
            got = PROGRAMS[program]()
        lib.settle()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        lib.settle()
        gc.collect()
        hazards = lib.lines("hazards")
    if hazards:
        return hazards[0]
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    same = all(
        torch.equal(a.view(integers[a.element_size()]), b.view(integers[b.element_size()]))
        for a, b in zip(got, want, strict=True)
    )
    return None if same else "bits differ"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_schedule_gives_the_same_bits(program, style):
    assert goes_wrong(program, None, crc32(program.encode()), style) is None


@pytest.mark.parametrize("place", places(), ids=str)
def test_control_a_wait_that_is_left_out_is_noticed(place):
    programs = [name for name in PROGRAMS if (place.file, place.line) in right(name)[1]]
    assert programs, "no program comes by"
    for seed in SEEDS:
        for style in STYLES[1:]:
            for program in programs:
                if shown := goes_wrong(program, place, seed, style):
                    print(f"{place}: {program}, seed {seed}, {style}: {shown}")
                    return
    pytest.fail("no schedule noticed it")
