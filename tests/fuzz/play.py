"""Runs programs; makes a failing one smaller, and says what is left of it."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterable

import torch

from .program import Program
from .world import World

__all__ = ["Failed", "play", "play_all", "shrunk"]


class Failed(AssertionError):
    """A program failed; the message is all that is needed to play it again."""


def play(program: Program, told: Callable[[str], None] = lambda _: None) -> None:
    """Runs a program to its end, or to the first error or difference. `told` hears of each operation first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world = World(program)
        for number in program.kept_operations:
            told(f"{number}: {program.name(number)}")
            world.run(number)
            world.check()
        world.end()


def play_all(seeds: Iterable[int]) -> None:
    """Raises Failed for the first seed that fails, with its program made as small as it gets."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's pool costs more than it brings on tensors this small
    try:
        for seed in seeds:
            error = _error_of(Program(seed))
            if error is not None:
                raise Failed(report(shrunk(Program(seed)), error))
    finally:
        torch.set_num_threads(threads)


def shrunk(program: Program) -> Program:
    """What still fails when no operation and no parameter can be left out of it. With the kind of error that the whole
    had: another is another fault."""
    kind = type(_error_of(program))
    smaller = kind is not type(None)
    while smaller:
        smaller = False
        for number in reversed(program.kept_operations):
            shorter = program.without(operations={number})
            if type(_error_of(shorter)) is kind:
                program, smaller = shorter, True
        for key in reversed(program.kept_params):
            fewer = program.without(params={key})
            if fewer.kept_params and type(_error_of(fewer)) is kind:
                program, smaller = fewer, True
    return program


def report(program: Program, first: Exception) -> str:
    """Of a program made smaller, and the error that it had when it was whole."""
    told: list[str] = []
    error = _error_of(program, told.append)
    world = World(program)
    params = [f"{key}: {p.dtype} {tuple(p.shape)}, strides {p.stride()}" for key, p in world.params.items()]
    lines = traceback.format_exception(error or first)
    if error is None:
        lines.append("it does not fail every time: not when it was played again")
    return "\n  ".join(
        [
            f"seed {program.seed} fails; play it again from the repository's root:",
            f"    python -m tests.fuzz {program}",
            f"{program.setup}",
            "parameters",
            *(f"  {line}" for line in params),
            "operations, to the one that failed",
            *(f"  {line}" for line in told),
            *"".join(lines).splitlines()[-12:],
        ]
    )


def _error_of(program: Program, told: Callable[[str], None] = lambda _: None) -> Exception | None:
    try:
        play(program, told)
    except Exception as error:
        return error
    return None
