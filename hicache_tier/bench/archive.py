"""`hicache-tier bench archive`."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import click

from hicache_tier.cli.numbers import Size
from hicache_tier.cli.output import json_option, print_json, show, size, table

_PARTS = ("exports", "imports", "codecs", "load", "memory")


@click.command("archive", short_help="Measure exports and imports against plain copies.")
@click.option("--root", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path(),
              help="Directory to measure in.")  # fmt: skip
@click.option(
    "--size", "total", type=Size(), default="1GiB", show_default=True, help="Payload of each store."
)
@click.option("--page", type=Size(), default="2MiB", show_default=True, help="Bytes of a page.")
@click.option("--repeats", type=click.IntRange(3), default=5, show_default=True, help="Turns; medians count.")
@click.option("--only", type=click.Choice(_PARTS), multiple=True, help="Only these measurements.")
@json_option
def command(  # noqa: PLR0917 - click passes options by name
    root: Path, total: int, page: int, repeats: int, only: tuple[str, ...], as_json: bool
) -> None:
    """Measure exports and imports, every byte checked first.

    Each figure is a ratio to something measured in turn with it: `cp` of the same bytes into a fresh file,
    with or without fsync as what it is compared with, or the import of the same archive unconverted. What was
    written is removed at the end.
    """
    from rich.console import Console
    from rich.progress import Progress

    from .archive_rig import ArchiveRig
    from .archive_runs import ArchiveBench

    wanted = only or _PARTS
    rig = ArchiveRig(root, total, page)
    found: dict[str, Any] = {"bytes": rig.nbytes, "page_nbytes": rig.page_nbytes, "host": _host(root)}
    console = Console(file=sys.stderr)
    try:
        with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
            task = bar.add_task("measuring", total=None)
            bench = ArchiveBench(rig, repeats, lambda: bar.advance(task))
            bench.prepare()
            for name in wanted:
                found[name] = getattr(bench, name)()
    finally:
        rig.close()
    if as_json:
        print_json(found)
    else:
        _print(found)


def _host(root: Path) -> dict[str, Any]:
    from hicache_tier_storage.probe import filesystem

    return {"cores": os.cpu_count(), "kernel": platform.release(), "filesystem": filesystem(root)}


def _print(found: dict[str, Any]) -> None:
    facts = ", ".join(f"{name} {value}" for name, value in found["host"].items())
    rows = [*found.get("exports", ()), *found.get("imports", ())]
    if rows:
        title = f"{size(found['bytes'])} in pages of {size(found['page_nbytes'])} ({facts})"
        columns = ["", ">GB/s", "against", ">GB/s", ">ratio"]
        show(
            table(
                title,
                columns,
                (
                    (
                        row["what"],
                        f"{row['gb_s']:.2f}",
                        row["against"],
                        f"{row['against_gb_s']:.2f}",
                        f"{row['ratio']:.2f}",
                    )
                    for row in rows
                ),
            )
        )
    for row in found.get("codecs", ()):
        show(f"{row['what']}: {row['gb_s']:.2f} GB/s, {row['gb_s_a_core']:.2f} GB/s a core")
    if "load" in found:
        load = found["load"]
        show(
            f"{load['what']}: {load['gb_s']:.2f} GB/s, alone {load['alone_gb_s']:.2f} GB/s, "
            f"{100 * load['slowed_by']:.0f} % slower; exported {load['export_gb_s']:.2f} GB/s"
        )
    if "memory" in found:
        memory = found["memory"]
        show(f"peak memory: export {size(memory['export_bytes'])}, import {size(memory['import_bytes'])}")
