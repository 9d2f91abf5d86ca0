"""How verbs talk: tables and JSON on stdout, progress on stderr where a person watches."""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import Console, RenderableType
    from rich.table import Table

_UNBOUNDED = 10_000
_ORDERS = (*range(9), *range(11, 32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_WRITTEN_OUT = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _ORDERS}

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text for people.")


def print_json(data: object) -> None:
    """Print `data` as one JSON document; numbers that JSON has no word for become null."""
    click.echo(json.dumps(_finite(data), indent=2, default=str))


def _finite(data: object) -> object:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def visible(text: str) -> str:
    """Write out what would give a terminal orders: names of files and models may hold anything."""
    return text.translate(_WRITTEN_OUT)


def stdout() -> Console:
    """Console for results; of 160 columns where stdout is not a terminal and COLUMNS does not say."""
    from .console import ResultConsole

    said = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return ResultConsole(file=sys.stdout, width=None if said else 160)


def stderr() -> Console:
    """Console for progress and remarks."""
    from rich.console import Console

    return Console(file=sys.stderr, highlight=False)


def show(*parts: RenderableType) -> None:
    """Print rich renderables on stdout."""
    console = stdout()
    for part in parts:
        console.print(part)


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Build a table; a column whose name starts with `>` is right-aligned."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        result.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    for row in rows:
        result.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return result


def show_records(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows as a table where it is no wider than the console, and otherwise a block of lines a row."""
    from rich.text import Text

    whole = table(None, columns, rows)
    console = stdout()
    if console.measure(whole, options=console.options.update(width=_UNBOUNDED)).maximum <= console.width:
        console.print(whole)
        return
    names = [name.removeprefix(">") for name in columns]
    for row in rows:
        console.print()
        for name, cell in zip(names, row, strict=True):
            console.print(Text.assemble((f"  {name:<14}", "dim"), str(cell)))
    console.print()


def mark(ok: bool) -> Any:  # noqa: ANN401 - rich is imported lazily
    """Return a coloured yes or no."""
    from rich.text import Text

    return Text("yes", style="green") if ok else Text("no", style="red")


def size(nbytes: int) -> str:
    """Bytes in human binary units."""
    from humanfriendly import format_size

    return str(format_size(nbytes, binary=True))


def count(number: int, noun: str) -> str:
    """Return a number and its noun, which takes an s but where it is one."""
    return f"{number} {noun}{'s' * (number != 1)}"


def age(seconds: float) -> str:
    """Return a time span in its largest sensible unit, for example `3 h`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"


@contextmanager
def progress(description: str, unit: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar on stderr while the body runs; yield `None` where stderr is not a terminal.

    The callable that it yields takes how many are done and how many there are.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit))
    with Progress(*columns, TimeRemainingColumn(), console=stderr(), transient=True) as bar:
        task = bar.add_task(description, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report


@contextmanager
def byte_progress(description: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a bar with rate and time left on stderr while the body runs; `None` where it is no terminal.

    The callable that it yields takes how many bytes are done and how many there are.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
    rates = (TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, *rates, console=stderr(), transient=True) as bar:
        task = bar.add_task(description, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield report
