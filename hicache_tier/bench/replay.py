"""`hicache-tier bench replay`."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import click

from hicache_tier.cli.numbers import Finite, Size
from hicache_tier.cli.output import json_option, print_json, progress
from hicache_tier.layout import Layout

_FINDING = 1
_PEERS = ("file-a-page", "sglang-file")


@click.command("replay", short_help="Replay a trace of requests through the tier, with real bytes.")
@click.argument("trace", metavar="TRACE")
@click.option("--requests", type=click.IntRange(1), help="The first so many.  [default: all; 1000 generated]")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of a generated trace.")
@click.option("--root", type=click.Path(path_type=Path, file_okay=False, exists=True), default=Path(),
              help="Directory for the stores; what is written is removed.")  # fmt: skip
@click.option("--model", default="tiny", show_default=True,
              help="Geometry: tiny (64 KiB a page), or a name that bench transfer knows.")  # fmt: skip
@click.option("--page-tokens", type=click.IntRange(1), default=16, show_default=True, help="Tokens a page.")
@click.option("--pages-per-block", "pages_a_block", type=click.IntRange(1), default=1, show_default=True,
              help="Pages a block of 512 tokens stands for; 512 / page tokens is full size.")  # fmt: skip
@click.option(
    "--layout",
    default="page_first",
    type=click.Choice([layout.value for layout in Layout]),
    show_default=True,
    help="Layout of the host pool.",
)
@click.option("--device", default="cpu", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
@click.option("--device-pages", type=click.IntRange(0), default=0, show_default=True,
              help="Pages that stay on the device between requests.")  # fmt: skip
@click.option("--host-size", "host_nbytes", type=Size(), help="Host pool.  [default: a quarter of the pages]")
@click.option("--capacity", "capacity_nbytes", type=Size(), help="Store.  [default: all pages fit]")
@click.option("--policy", default="write_through", show_default=True, help="Write policy of the tier.")
@click.option("--prefetch", default="wait_complete", show_default=True, help="Prefetch policy of the tier.")
@click.option("--lookup-timeout", "lookup_timeout_s", type=Finite(0, 3600, min_open=True), default=1.0,
              show_default=True, help="Seconds that match waits for the store.")  # fmt: skip
@click.option("--engine", default="auto", show_default=True, help="Byte engine of the store.")
@click.option("--io-mode", default="auto", show_default=True, help="auto, direct or buffered.")
@click.option("--speed", type=Finite(0), default=0.0, show_default=True,
              help="Times as fast as the trace; 0: as fast as the writes keep up.")  # fmt: skip
@click.option("--peer", "peers", multiple=True, type=click.Choice(_PEERS),
              help="The same trace through this store, under the same tier.")  # fmt: skip
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the timeline.")
@json_option
@click.pass_context
def command(ctx: click.Context, /, plot: Path | None, as_json: bool, **wish: Any) -> None:  # noqa: ANN401 - options
    """Replay TRACE: a file in Mooncake's format, or `generated` for requests with the same statistics.

    Every block of a prompt becomes pages of the model, whose bytes follow from their key; each page that is
    loaded is compared with them, and a wrong one ends with exit code 1. Hits are counted by tier and compared
    with an LRU without a bound.
    """
    if plot is not None:
        from .plotting import check_picture

        check_picture(plot)
    from .replay_session import ReplaySession, ReplayWish

    session = ReplaySession(ReplayWish(**wish))
    with progress("replaying", "requests") as report:
        done = count(1)
        result = session.run(lambda: report(next(done), len(session)) if report else None)
    if plot is not None:
        from .replay_plot import plot_replay

        plot_replay(result, plot)
    if as_json:
        print_json(result)
    else:
        from .replay_report import print_result

        print_result(result)
    if any(run["wrong_pages"] for run in (result, *result["peers"])):
        ctx.exit(_FINDING)
