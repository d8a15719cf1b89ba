"""python -m tests.faults: plants faults and reports which test noticed each."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from .judge import ROOT, Verdict, copy_tree, judge
from .mutate import SOURCES, mutations
from .planted import PLANTED


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    by_hand = commands.add_parser("planted", help="the faults by hand; fails unless every one is caught")
    by_hand.add_argument("names", nargs="*", help="parts of names; all of them without")
    at_random = commands.add_parser("random", help="random mutations; fails where fewer than 90% are caught")
    at_random.add_argument("--count", type=int, default=100)
    at_random.add_argument("--seed", type=int, default=0)
    at_random.add_argument("--files", nargs="*", default=[], help="parts of names of the files to change; all without")
    at_random.add_argument("--log", type=Path, help="a file of verdicts: those in it are not judged again")
    for command in (by_hand, at_random):
        command.add_argument("--no-control", action="store_true", help="do not judge the sources as they are first")
    arguments = parser.parse_args()
    for paths in () if arguments.no_control else (frozenset({"csrc/adam_rule.h"}), frozenset()):
        control = _plant([], paths)
        if control.outcome != "survived":
            print(f"the sources as they are: {control}")
            return 2
    if arguments.command == "planted":
        chosen = [f for f in PLANTED if not arguments.names or any(n in f.name for n in arguments.names)]
        verdicts = [_report(f.name, _plant(f.edits)) for f in chosen]
        return _summary(verdicts, 1.0)
    files = [s for s in SOURCES if not arguments.files or any(f in s for f in arguments.files)]
    if not files:
        parser.error(f"--files {' '.join(arguments.files)}: no file of {', '.join(SOURCES)}")
    return _summary(_random(files, arguments.count, arguments.seed, arguments.log), 0.9)


def _random(files: list[str], count: int, seed: int, log: Path | None) -> list[Verdict]:
    known = {}
    if log and log.exists():
        known = {key: Verdict(*verdict) for key, verdict in map(json.loads, log.read_text().splitlines())}
    sources = hashlib.sha256(b"".join((ROOT / path).read_bytes() for path in files)).hexdigest()
    verdicts: list[Verdict] = []
    for mutation in mutations(ROOT, seed, files):
        if len(verdicts) == count:
            break
        key = f"{sources[:16]} {mutation.path} {mutation.start} {mutation.end} {mutation.new}"
        verdict = known.get(key) or _plant([mutation])
        if log and key not in known:
            with log.open("a") as file:
                file.write(json.dumps([key, [verdict.outcome, verdict.by, verdict.seconds]]) + "\n")
        if verdict.outcome != "invalid":
            verdicts.append(_report(str(mutation), verdict))
    return verdicts


def _plant(edits: Collection, paths: frozenset[str] = frozenset()) -> Verdict:
    """`paths`: files to take as changed beside those of the edits."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        for edit in edits:
            edit.apply(tree)
        return judge(tree, paths | {edit.path for edit in edits})


def _report(name: str, verdict: Verdict) -> Verdict:
    cells = [name, verdict.by or verdict.outcome, f"{verdict.seconds:.0f} s"]
    print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |", flush=True)
    return verdict


def _summary(verdicts: list[Verdict], needed: float) -> int:
    by_test = Counter(re.split(r"\[| \(", v.by)[0] for v in verdicts if v.outcome == "caught")
    for test, count in by_test.most_common():
        print(f"{count} by {test}")
    caught = by_test.total()
    print(f"{caught} of {len(verdicts)} caught")
    return 0 if verdicts and caught >= needed * len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
