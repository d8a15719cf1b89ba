"""What `statestream doctor` prints, and its exit status."""

from __future__ import annotations

import json
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from statestream.doctor.findings import Finding, Verdict

__all__ = ["report"]

_STYLES = {Verdict.OK: "green", Verdict.NOTE: "dim", Verdict.PROBLEM: "bold red"}


def report(findings: Iterable[Finding], as_json: bool) -> int:
    """Prints each finding as it comes; 0 where there is no problem, 1 where there is one."""
    console = Console(highlight=False)
    problems = 0
    shown = []
    for finding in findings:
        problems += finding.verdict is Verdict.PROBLEM
        if as_json:
            shown.append(
                {
                    "subject": finding.subject,
                    "verdict": finding.verdict.value,
                    "text": finding.text,
                    "advice": finding.advice,
                }
            )
            continue
        line = Text(f"{finding.verdict.value:<8}", style=_STYLES[finding.verdict])
        console.print(
            line.append(f"{finding.subject}: ", style="not dim bold").append(finding.text, style="not dim"),
            soft_wrap=True,
        )
        if finding.advice:
            console.print(Text(f"{'':<8}what to do: {finding.advice}"), soft_wrap=True)
    if as_json:
        print(json.dumps({"problems": problems, "findings": shown}, indent=2))
    else:
        console.print(f"{problems} problem{'' if problems == 1 else 's'}")
    return 1 if problems else 0
