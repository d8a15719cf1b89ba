"""Mistakes in Python code by hand, out of python_planted.txt."""

from __future__ import annotations

from pathlib import Path

from .planted import Fault
from .python_judge import PACKAGE
from .source import Edit

__all__ = ["PYTHON_PLANTED", "faults_of"]


def faults_of(text: str) -> list[Fault]:
    """Each a line `== FILE: name`, then lines of the text as it is after `-`, and of what replaces it after `+`."""
    faults = []
    for part in ("\n" + text).split("\n== ")[1:]:
        title, *lines = part.splitlines()
        path, name = title.split(": ", 1)
        old, new = ("\n".join(line[1:] for line in lines if line[:1] == mark) for mark in "-+")
        faults.append(Fault(name, (Edit(PACKAGE + path, old, new),)))
    return faults


PYTHON_PLANTED = faults_of(Path(__file__).with_suffix(".txt").read_text())
