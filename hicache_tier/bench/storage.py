"""`hicache-tier bench storage`."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any

import click

from hicache_tier.cli.numbers import Finite
from hicache_tier.cli.output import json_option, print_json, progress
from hicache_tier.layout import Layout

from .peers import PEERS
from .report_file import check_report_file
from .storage_cases import DEFAULT, SWEEP
from .storage_sources import SOURCES

_FINDING = 1


@click.command("storage", short_help="Measure the store against a bare loop and against peers.")
@click.option("--root", type=click.Path(path_type=Path, file_okay=False, exists=True), default=Path(),
              help="Directory to measure in.")  # fmt: skip
@click.option("--case", "cases", multiple=True, help=f"PAGESxSIZE.  [default: {', '.join(DEFAULT)}]")
@click.option("--sweep", is_flag=True, help="128 MiB each in pages of 64 KiB to 16 MiB.")
@click.option("--mode", "modes", multiple=True, default=("buffered", "direct"), show_default=True,
              type=click.Choice(["buffered", "direct"]), help="How bytes move.")  # fmt: skip
@click.option("--engine", type=click.Choice([*SOURCES, "all"]), default="posix", show_default=True,
              help="Byte engine, or all that work.")  # fmt: skip
@click.option("--peer", "peers", multiple=True, type=click.Choice([*PEERS, "all", "none"]),
              help="Measure it over the same pages.  [default: file-a-page, fio if installed]")  # fmt: skip
@click.option(
    "--layout",
    default="page_first",
    type=click.Choice([layout.value for layout in Layout]),
    show_default=True,
    help="Layout of the host pool.",
)
@click.option(
    "--threads",
    "threads",
    multiple=True,
    type=click.IntRange(1),
    help="I/O threads.  [default: cores, 8 at most]",
)
@click.option("--depth", "depths", multiple=True, type=click.IntRange(1),
              help="Pages that a call is given at once.  [default: all of a case]")  # fmt: skip
@click.option("--mix", "mixes", multiple=True, type=click.IntRange(1, 99),
              help="Per cent of reads beside writes; a row more each.")  # fmt: skip
@click.option("--encryption", is_flag=True,
              help="Also with pages encrypted, as a ratio to the same without. "
                   "Needs the extra encryption.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(3), default=7, show_default=True, help="Turns; medians count.")
@click.option("--slots", type=click.IntRange(0), default=500_000, show_default=True,
              help="Slots of the store whose opening is timed; 0 for throughput alone.")  # fmt: skip
@click.option("--allow-cached", is_flag=True,
              help="Give figures of the page cache too, and figures above the device's link.")  # fmt: skip
@click.option("--link-gb-s", type=Finite(0, min_open=True),
              help="What the device's link carries, GB/s.  [default: as PCIe tells]")  # fmt: skip
@click.option("--markdown", "markdown_path", type=click.Path(dir_okay=False, path_type=Path),
              help="Write the tables as Markdown.")  # fmt: skip
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw GB/s by page size.")
@json_option
@click.pass_context
def command(  # noqa: PLR0917 - click passes options by name
    ctx: click.Context,
    root: Path,
    cases: tuple[str, ...],
    sweep: bool,
    modes: tuple[str, ...],
    engine: str,
    peers: tuple[str, ...],
    layout: str,
    threads: tuple[int, ...],
    depths: tuple[int, ...],
    mixes: tuple[int, ...],
    encryption: bool,
    repeats: int,
    slots: int,
    allow_cached: bool,
    link_gb_s: float | None,
    markdown_path: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure put and get, every byte checked first.

    Each figure is a ratio to something measured in turn with it: a bare pwritev/preadv loop over the same
    slots in the same mode with as many threads, and peers that keep the same pages in another way. Figures
    are of the device: O_DIRECT, or the page cache dropped before reads and writes timed to the device.
    Figures above the device's link are refused (exit code 1). What was written is removed at the end.
    """
    if plot is not None:
        from .plotting import check_picture

        check_picture(plot)
    if markdown_path is not None:
        check_report_file(markdown_path, "--markdown")
    from hicache_tier_storage.posix import MOST_THREADS

    from .storage_session import StorageSession, StorageWish

    wish = StorageWish(
        root=root,
        cases=cases or (SWEEP if sweep else DEFAULT),
        modes=modes,
        engine=engine,
        peers=peers,
        layout=layout,
        threads=threads or (min(MOST_THREADS, os.cpu_count() or 1),),
        depths=depths,
        mixes=mixes,
        repeats=repeats,
        slots=slots,
        allow_cached=allow_cached,
        link_gb_s=link_gb_s,
        encryption=encryption,
    )
    session = StorageSession(wish)
    with progress("measuring", "shapes") as report:
        done = count(1)
        result = session.run(lambda: report(next(done), len(session)) if report else None)
    _give(result, markdown_path, plot, as_json=as_json)
    if result["refused"]:
        ctx.exit(_FINDING)


def _give(result: dict[str, Any], markdown_path: Path | None, plot: Path | None, *, as_json: bool) -> None:
    """Print and write a result in the forms asked for."""
    from .storage_report import markdown, print_result

    if markdown_path is not None:
        markdown_path.write_text(markdown(result))
    if plot is not None:
        from .storage_plot import plot_storage

        plot_storage(result, plot)
    if as_json:
        print_json(result)
    else:
        print_result(result)
