"""python -m tests.fuzz SEED: plays a program again, or, with --count, as many seeds from there on."""

from __future__ import annotations

import argparse
import sys

from .play import Failed, play, play_all
from .program import Program


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--operations", type=numbers, help="of its operations only these, by number")
    parser.add_argument("--params", type=numbers, help="of its parameters only these, by number")
    parser.add_argument("--count", type=int, help="play so many seeds, and make the first that fails smaller")
    wanted = parser.parse_args()
    if wanted.count is None:
        play(Program(wanted.seed, wanted.operations, wanted.params), print)
        print("nothing failed")
        return 0
    try:
        play_all(range(wanted.seed, wanted.seed + wanted.count))
    except Failed as failed:
        print(failed)
        return 1
    print(f"{wanted.count} programs, nothing failed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
