"""A table of Markdown, which is also what the terminal shows."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading."""

    title: str
    about: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Columns aligned: the first to the left, figures to the right."""
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        lines = [
            "| " + " | ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))) + " |"
            for row in (self.header, *self.rows)
        ]
        rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
        return "\n".join([f"## {self.title}", "", self.about, "", lines[0], rule, *lines[1:], ""])
