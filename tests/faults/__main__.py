"""python -m tests.faults: plants faults and reports which test noticed each."""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import astuple
from itertools import islice
from pathlib import Path
from typing import Any

from .judge import ROOT, Verdict, copy_tree, judge
from .mutate import SOURCES, mutations
from .planted import PLANTED
from .python_judge import RUNGS, SOON, first_files, judge_python, python_sources, rungs_of
from .python_mutate import python_mutations
from .python_planted import PYTHON_PLANTED


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
    python = commands.add_parser("python", help="mistakes in Python code, by hand or at random")
    python.add_argument("names", nargs="*", help="parts of names or files; all of them without")
    python.add_argument("--random", type=int, metavar="COUNT", help="so many random ones in place of those by hand")
    python.add_argument("--seed", type=int, default=0)
    python.add_argument("--log", type=Path, help="a file of verdicts: those in it are not judged again")
    python.add_argument("--again", action="store_true", help="judge again what survived")
    python.add_argument("--until", choices=RUNGS, default="rest", help="which tests are the last to be asked")
    for command in (by_hand, at_random, python):
        command.add_argument("--no-control", action="store_true", help="do not judge the sources as they are first")
    arguments = parser.parse_args()
    if arguments.command == "python":
        return _python(arguments)
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
    known = _known(log)
    sources = hashlib.sha256(b"".join((ROOT / path).read_bytes() for path in files)).hexdigest()
    verdicts: list[Verdict] = []
    for mutation in mutations(ROOT, seed, files):
        if len(verdicts) == count:
            break
        key = f"{sources[:16]} {mutation.path} {mutation.start} {mutation.end} {mutation.new}"
        verdict = known.get(key) or _plant([mutation])
        if log and key not in known:
            _keep(log, key, verdict)
        if verdict.outcome != "invalid":
            verdicts.append(_report(str(mutation), verdict))
    return verdicts


def _known(log: Path | None) -> dict[str, Verdict]:
    if log is None or not log.exists():
        return {}
    return {key: Verdict(*verdict) for key, verdict in map(json.loads, log.read_text().splitlines())}


def _keep(log: Path, key: str, verdict: Verdict) -> None:
    with log.open("a") as file:
        file.write(json.dumps([key, astuple(verdict)]) + "\n")


def _python(arguments: argparse.Namespace) -> int:
    chosen = _chosen(arguments)
    if not chosen:
        print("no such mistake")
        return 2
    known, verdicts = _known(arguments.log), []
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        compileall.compile_dir(tree / "python", quiet=1)  # once, and not in each process that tests
        if not arguments.no_control:
            control = judge_python(tree, first_files(edit.path for _, edit in chosen))
            if control.outcome != "survived":
                print(f"the sources as they are: {control}")
                return 2
        for name, edit in chosen:
            source = (tree / edit.path).read_text()
            key = f"{hashlib.sha256(source.encode()).hexdigest()[:16]} {edit.path} {name} {edit.new}"
            verdict = known.get(key)
            if rungs := _rungs_left(verdict, edit.path, arguments):
                edit.apply(tree)
                try:
                    verdict = judge_python(tree, rungs)
                finally:
                    (tree / edit.path).write_text(source)
                if arguments.log:
                    _keep(arguments.log, key, verdict)
            verdicts.append(_report(name, verdict))
    return _python_summary(verdicts, 1.0 if arguments.random is None else 0.9)


def _chosen(arguments: argparse.Namespace) -> list[tuple[str, Any]]:
    """Names and edits."""
    words = arguments.names
    if arguments.random is None:
        planted = [(f"`{Path(f.edits[0].path).name}`: {f.name}", f.edits[0]) for f in PYTHON_PLANTED]
        return [(name, edit) for name, edit in planted if not words or any(w in f"{edit.path} {name}" for w in words)]
    sources = [path for path in python_sources() if not words or any(w in path for w in words)]
    mutations = islice(python_mutations(ROOT, arguments.seed, sources), arguments.random)
    return [(f"{mutation} at {mutation.start}", mutation) for mutation in mutations]


def _rungs_left(verdict: Verdict | None, path: str, arguments: argparse.Namespace) -> dict[str, list[str]]:
    """What there is still to ask of a mistake with this verdict."""
    rungs = rungs_of(path, arguments.until)
    if verdict is None or (verdict.outcome == "survived" and arguments.again):
        return rungs
    order = list(RUNGS)
    asked = order if verdict.outcome == "caught" else order[: order.index(verdict.rung) + 1]
    return {rung: tests for rung, tests in rungs.items() if rung not in asked}


def _python_summary(verdicts: Sequence[Verdict], needed: float) -> int:
    status = _summary(verdicts, needed)
    caught = [v for v in verdicts if v.outcome == "caught"]
    by_rung = Counter(v.rung for v in caught)
    print(", ".join(f"{by_rung[rung]} by {what}" for rung, what in RUNGS.items()))
    soon = sum(v.rung == "first" and v.seconds < SOON for v in caught)
    print(f"{soon} of {len(caught)} by the first file within {SOON} s of a processor")
    return status


def _plant(edits: Collection, paths: frozenset[str] = frozenset()) -> Verdict:
    """`paths`: files to take as changed beside those of the edits."""
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        for edit in edits:
            edit.apply(tree)
        return judge(tree, paths | {edit.path for edit in edits})


def _report(name: str, verdict: Verdict) -> Verdict:
    cells = [name, verdict.by or verdict.outcome, *filter(None, [verdict.rung]), f"{verdict.seconds:.0f} s"]
    print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |", flush=True)
    return verdict


def _summary(verdicts: Sequence[Verdict], needed: float) -> int:
    by_test = Counter(re.split(r"\[| \(", v.by)[0] for v in verdicts if v.outcome == "caught")
    for test, count in by_test.most_common():
        print(f"{count} by {test}")
    caught = by_test.total()
    print(f"{caught} of {len(verdicts)} caught")
    return 0 if verdicts and caught >= needed * len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
