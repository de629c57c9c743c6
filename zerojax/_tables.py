"""Tables as plain text and as HTML, and a bar for long work."""

import dataclasses
import html
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Table:
    """What a report shows.

    Attributes:
      head: of the columns.
      rows: the cells.
      summary: lines below the table.
      title: the line above it, if there is one.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    summary: Sequence[str] = ()
    title: str = ""

    def __str__(self) -> str:
        title = [self.title] * bool(self.title)
        return "\n".join([*title, *text_table(self.head, self.rows), *self.summary])

    def html(self) -> str:
        """The same as HTML."""
        title, *lines = (f"<p>{html.escape(line)}</p>" for line in (self.title, *self.summary))
        return title * bool(self.title) + html_table(self.head, self.rows) + "".join(lines)


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, columns aligned."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in [head, *rows]]


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as HTML."""

    def line(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    return "<table>" + line("th", head) + "".join(line("td", row) for row in rows) + "</table>"


def progress(items: Sequence[Any], title: str) -> Iterable[Any]:
    """The items; with a bar of how many are done, on a terminal and with rich."""
    if not (sys.stderr.isatty() and importlib.util.find_spec("rich")):
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, title, console=Console(stderr=True), transient=True)


def in_bytes(n: float) -> str:
    """A number of bytes with a fitting unit: `1.5 MB`, powers of a thousand."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"
