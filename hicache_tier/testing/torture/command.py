"""Command line of the torture."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import click

from .session import FINDINGS, Session


@click.command()
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=60.0, show_default=True, help="For how long."
)
@click.option("--seed", type=int, help="Of everything that is chosen at random; by the clock if not given.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(exists=True, file_okay=False),
    help="Where roots are made; a temporary one if not given.",
)
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
def main(seconds: float, seed: int | None, folder: str | None, as_json: bool) -> None:
    """Have processes put, get, evict, clear and export while they are killed and their files damaged.

    Exit code 1 where anything was found: wrong bytes, a page lost, a call stuck, anything left behind.
    """
    seed = time.time_ns() % (1 << 31) if seed is None else seed

    def say(line: str) -> None:
        click.echo(line, err=True)

    with tempfile.TemporaryDirectory(prefix="hct-torture-", dir=folder) as place:
        summary = Session(Path(place), seed, say).run(seconds)
    if as_json:
        click.echo(json.dumps(summary))
    else:
        for name, value in summary.items():
            click.echo(f"{name:24} {value}")
    sys.exit(any(summary[name] for name in FINDINGS))
