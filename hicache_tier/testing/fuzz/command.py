"""Command line of the fuzzing."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import click

from .campaign import campaign
from .target import targets

ENGINES = ("auto", "atheris", "mutation")


@click.command()
@click.option("--seconds", type=click.FloatRange(min=1), default=60.0, show_default=True, help="In all.")
@click.option("--target", "names", multiple=True, help="Only these; --list tells their names.")
@click.option("--engine", type=click.Choice(ENGINES), default="auto", show_default=True,
              help="atheris is led by coverage, and taken where it is installed.")  # fmt: skip
@click.option("--seed", type=int, help="By the clock if not given.")
@click.option("--corpus", type=click.Path(file_okay=False, path_type=Path), default=Path("tests/fuzz/corpus"),
              show_default=True, help="A folder a target with more input to begin with.")  # fmt: skip
@click.option("--findings", type=click.Path(file_okay=False, path_type=Path),
              help="Where what was found is kept; a temporary folder if not given.")  # fmt: skip
@click.option("--list", "listed", is_flag=True, help="Only name the targets.")
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
def main(  # noqa: PLR0917 - click passes options by name
    seconds: float,
    names: tuple[str, ...],
    engine: str,
    seed: int | None,
    corpus: Path,
    findings: Path | None,
    listed: bool,
    as_json: bool,
) -> None:
    """Fuzz everything that reads bytes which others may have written.

    Exit code 1 where anything was found. Put the file that was kept into tests/fuzz/corpus, in the folder of
    its target, with the fix: CI reads it from then on.
    """
    known = sorted(targets())
    if listed:
        click.echo("\n".join(known))
        return
    unknown = sorted({*names} - {*known})
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}.", param_hint="--target")
    guided = engine == "atheris" or (engine == "auto" and find_spec("atheris") is not None)
    seed = time.time_ns() % (1 << 31) if seed is None else seed
    place = Path(tempfile.mkdtemp(prefix="hct-fuzz-")) if findings is None else findings
    results = campaign(names or known, seconds, seed, corpus, place, guided=guided)
    found = 0
    for result in results:
        found += len(result["findings"])
        click.echo(f"{result['target']:<16} {result['runs']:>9} runs", err=True)
        for line in result["findings"]:
            click.echo(f"  {line}", err=True)
    click.echo(f"seed {seed}; what was found is in {place}" if found else f"seed {seed}; nothing", err=True)
    if not any(place.iterdir()):
        place.rmdir()
    if as_json:
        print(json.dumps({"seed": seed, "guided": guided, "targets": results}))
    sys.exit(1 if found else 0)
