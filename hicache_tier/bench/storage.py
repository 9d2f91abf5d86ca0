"""`hicache-tier bench storage`."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any, Self

import click

from hicache_tier.cli.output import json_option, print_json, show, size, table

_CASES = ("256x2MiB", "2048x64KiB")


def _case(text: str) -> tuple[int, int]:
    from humanfriendly import InvalidSize, parse_size

    count, _, nbytes = text.partition("x")
    try:
        pages, page_nbytes = int(count), int(parse_size(nbytes, binary=True))
    except (ValueError, InvalidSize) as error:
        raise click.BadParameter(f"{text!r} is not PAGESxSIZE such as 256x2MiB") from error
    if pages < 1 or page_nbytes < 1:
        raise click.BadParameter(f"{text!r}: pages and size must be above 0")
    return pages, page_nbytes


def host_facts(root: Path) -> dict[str, Any]:
    """Return what the figures were measured on."""
    from hicache_tier_storage.probe import filesystem

    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "filesystem": filesystem(root),
    }


@click.command("storage", short_help="Measure the store against a bare loop and against one file a page.")
@click.option("--root", type=click.Path(path_type=Path), default=Path(), help="Directory to measure in.")
@click.option("--case", "cases", multiple=True, default=_CASES, show_default=True, help="PAGESxSIZE.")
@click.option("--mode", "modes", multiple=True, default=("buffered", "direct"), show_default=True,
              type=click.Choice(["buffered", "direct"]), help="How bytes move.")  # fmt: skip
@click.option("--engine", type=click.Choice(["posix", "nixl", "kvikio", "all"]), default="posix",
              show_default=True, help="Byte engine, or all that work.")  # fmt: skip
@click.option("--layout", default="page_first", show_default=True, help="Layout of the host pool.")
@click.option("--threads", type=click.IntRange(1), default=os.cpu_count, show_default="cores")
@click.option("--repeats", type=click.IntRange(3), default=7, show_default=True, help="Turns; medians count.")
@click.option("--slots", type=click.IntRange(1), default=500_000, show_default=True,
              help="Slots of the store whose opening is timed.")  # fmt: skip
@json_option
def command(  # noqa: PLR0917 - click passes options by name
    root: Path,
    cases: tuple[str, ...],
    modes: tuple[str, ...],
    engine: str,
    layout: str,
    threads: int,
    repeats: int,
    slots: int,
    as_json: bool,
) -> None:
    """Measure put and get, every byte checked first.

    Each figure is a ratio to something measured in turn with it: a bare pwritev/preadv loop over the same
    slots in the same mode with as many threads, and one file a page (written aside, renamed, read cold).
    What was written is removed at the end.
    """
    from .storage_runs import StorageBench, StorageCase, bookkeeping, opening

    parsed = [StorageCase(*_case(text)) for text in cases]
    if not root.is_dir():
        raise click.BadParameter(f"{root} is not a directory", param_hint="--root")
    result: dict[str, Any] = {"rows": [], "peers": [], "host": host_facts(root)}
    engines, result["left_out"] = _engines(root, engine)
    runs = [
        (case, mode, sums, name)
        for case in parsed
        for mode in modes
        for sums in (False, True)
        for name in engines
    ]
    with _progress(len(runs) * (repeats + 1) * 8) as tick:
        for case, mode, sums, name in runs:
            bench = StorageBench(
                root, case, layout=layout, mode=mode, threads=threads, checksums=sums, engine=name
            )
            try:
                bench.check()
                result["rows"] += bench.run(repeats, tick)
                if not sums and name == "posix":
                    result["peers"] += bench.against_files(repeats, tick)
            finally:
                bench.close()
        result["bookkeeping"] = bookkeeping(root, repeats)
        result["opening"] = opening(root, slots, 3)
    _compare(result["rows"])
    if as_json:
        print_json(result)
    else:
        _print(result)


def _engines(root: Path, asked: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the engines to measure, and the rows of the probe for those that cannot be."""
    from hicache_tier_storage.probe import probe

    if asked != "all":
        return [asked], []
    rows = probe(root)
    usable = {row["engine"] for row in rows if row["usable"]}
    names = [name for name in ("posix", "nixl", "kvikio") if name in usable]
    return names, [row for row in rows if not row["usable"]]


def _compare(rows: list[dict[str, Any]]) -> None:
    """Add to each row what it is of `posix`: both measured as ratios to the bare loop in turn with them."""
    what = ("direction", "page_nbytes", "mode", "checksums")
    posix = {
        tuple(row[name] for name in what): row["ratio_to_bare"] for row in rows if row["engine"] == "posix"
    }
    for row in rows:
        base = posix.get(tuple(row[name] for name in what))
        row["ratio_to_posix"] = row["ratio_to_bare"] / base if base else None


class _progress:  # noqa: N801 - used as a function
    """A progress bar on stderr where a person watches."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(
            console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()
        )
        self._task = self._bar.add_task("measuring", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self) -> None:
        self._bar.advance(self._task)


def _print(result: dict[str, Any]) -> None:
    rows, peers = result["rows"], result["peers"]
    facts = ", ".join(f"{name} {value}" for name, value in result["host"].items())
    show(
        table(
            f"Against a bare loop over the same slots ({facts})",
            [
                "engine",
                "page",
                "mode",
                "checksums",
                "",
                ">GB/s",
                ">bare GB/s",
                ">ratio",
                ">of posix",
                ">CPU us/page",
                ">CPU ratio",
            ],
            (
                (
                    row["engine"],
                    size(row["page_nbytes"]),
                    row["mode"],
                    "on" if row["checksums"] else "off",
                    row["direction"],
                    f"{row['gb_s']:.2f}",
                    f"{row['bare_gb_s']:.2f}",
                    f"{row['ratio_to_bare']:.2f}",
                    f"{row['ratio_to_posix']:.2f}" if row["ratio_to_posix"] else "",
                    f"{row['cpu_us_per_page']:.0f}",
                    f"{row['cpu_ratio_to_bare']:.2f}",
                )
                for row in rows
            ),
        ),
        table(
            "Against one file a page",
            ["page", "mode", "", ">GB/s", ">files GB/s", ">ratio"],
            (
                (
                    size(row["page_nbytes"]),
                    row["mode"],
                    row["direction"],
                    f"{row['gb_s']:.2f}",
                    f"{row['peer_gb_s']:.2f}",
                    f"{row['ratio_to_peer']:.1f}",
                )
                for row in peers
            ),
        ),
    )
    book, opened = result["bookkeeping"], result["opening"]
    click.echo(
        f"Own work, batches of 128: put {book['put_us_per_page']:.1f} us a page, "
        f"get {book['get_us_per_page']:.1f} us a page; "
        f"match_prefix {book['match_keys_per_s'] / 1e6:.1f} M keys/s."
    )
    for row in result["left_out"]:
        click.echo(f"Left out: {row['engine']} {row['mode']}: {row['reason']}.")
    click.echo(f"Opening a store of {opened['slots']:,} pages: {opened['open_seconds']:.2f} s.")
