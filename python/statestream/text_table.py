"""A table as plain text, for reports that are printed where rich is not installed."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["text_table"]

_GAP = "  "


def text_table(*sections: Sequence[Sequence[str]]) -> str:
    """Rows of as many cells each, with a rule between sections. The first column is flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*(row for rows in sections for row in rows), strict=True)]
    rule = "-" * (sum(widths) + len(_GAP) * (len(widths) - 1))
    return f"\n{rule}\n".join("\n".join(_line(row, widths) for row in rows) for rows in sections if rows)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
    return _GAP.join(cells).rstrip()
