"""`hicache-tier bench sglang`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import click

from hicache_tier.cli.output import json_option, print_json, show, table
from hicache_tier.errors import EngineUnavailableError

_MIB = 1 << 20


@click.command("sglang", short_help="Measure the SGLang adapter on SGLang's own pools and controllers.")
@click.option("--root", type=click.Path(path_type=Path, file_okay=False, exists=True), default=Path(),
              help="Directory to measure in.")  # fmt: skip
@click.option("--page-kib", type=click.IntRange(8), default=2048, show_default=True, help="Size of a page.")
@click.option("--total-mib", type=click.IntRange(1), default=1024, show_default=True, help="A prefetch.")
@click.option("--io-mode", type=click.Choice(["buffered", "direct"]), default="buffered", show_default=True,
              help="Of the store.")  # fmt: skip
@click.option("--layout", default="page_first", show_default=True, help="Of SGLang's host pool.")
@click.option("--pages", type=click.IntRange(0), default=500_000, show_default=True,
              help="Pages of the store that is attached to; 0 to leave that out.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(3), default=5, show_default=True, help="Turns; medians count.")
@json_option
def command(  # noqa: PLR0917 - click passes options by name
    root: Path,
    page_kib: int,
    total_mib: int,
    io_mode: str,
    layout: str,
    pages: int,
    repeats: int,
    as_json: bool,
) -> None:
    """Measure what the adapter costs beyond the store, a prefetch beside a spinning thread, and an attach.

    Needs the real sglang package; on a machine without a GPU its host pools are used as they are.
    """
    from hicache_tier.testing.sglang_cpu import ServerContext, available

    if not available():
        raise EngineUnavailableError("sglang is not installed; scripts/check-sglang makes an environment.")
    folder = Path(tempfile.mkdtemp(prefix="hct-bench-sglang-", dir=root))
    context = ServerContext(f"file://{folder}/meet", page_size=16, served_model_name="bench")
    try:
        result = _measure(folder, page_kib * 1024, total_mib * _MIB, io_mode, layout, pages, repeats)
    finally:
        context.close()
        shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        print_json(result)
    else:
        _show(result)


def _measure(  # noqa: PLR0917 - the options, in order
    folder: Path, page_nbytes: int, total_nbytes: int, io_mode: str, layout: str, pages: int, repeats: int
) -> dict[str, Any]:
    from . import sglang_runs as runs

    return {
        "overhead": [runs.overhead(folder / f"o{size}", size, 3 * repeats) for size in (8192, 65536)],
        "prefetch": runs.prefetch(
            folder, page_nbytes, total_nbytes, io_mode=io_mode, layout=layout, repeats=repeats
        ),
        "attach": runs.attach(folder / "attach", pages) if pages else None,
    }


def _show(result: dict[str, Any]) -> None:
    rows = [
        (
            f"{one['page_nbytes'] // 1024} KiB",
            *(f"{one[f'{name}_us']:.2f}" for name in ("get", "set", "exists", "store_get", "hop")),
        )
        for one in result["overhead"]
    ]
    columns = ("page", ">get", ">set", ">exists", ">the store's get", ">a hop between threads")
    show(table("us a page: get and set beyond the store's own, the others in all", columns, rows))
    one = result["prefetch"]
    rows = [
        (
            name,
            f"{one[f'{name}_s']:.3f} s",
            f"{one['pages'] * one['page_nbytes'] / one[f'{name}_s'] / 1e9:.2f}",
        )
        for name in ("adapter", "store", "file")
    ]
    size = f"{one['pages']} pages of {one['page_nbytes'] // 1024} KiB"
    title = f"{size}, {one['io_mode']}, beside a spinning thread"
    show(table(title, ("by", ">time", ">GB/s"), rows))
    show(f"adapter to file backend {one['to_file']:.2f}, to the store's own get {one['to_store']:.2f}")
    if result["attach"]:
        show(f"attach to {result['attach']['pages']} pages: {result['attach']['attach_s']:.2f} s")
