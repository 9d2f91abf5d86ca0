"""`hicache-tier bench transfer`."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hicache_tier.cli.output import json_option, print_json, progress

from .transfer_cases import GEOMETRIES, IO_BACKENDS, LAYOUTS, ORDERS, PAGES, PEERS, TOKENS, Direction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_FINDING = 1
_INTERRUPTED = 130


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


class _Tokens(click.ParamType[int]):
    """A count of tokens, with K for 1024: `256`, `8K`."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401 - click's signature
        """Read one count."""
        text = str(value).upper()
        number, scale = (text[:-1], 1024) if text.endswith("K") else (text, 1)
        if not number.isdecimal() or not int(number):
            self.fail(f"{value!r} is not a count of tokens such as 256 or 8K.", param, ctx)
        return int(number) * scale


def _axis(
    name: str, dest: str, allowed: Sequence[str], text: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(name, dest, multiple=True, type=click.Choice(list(allowed)), help=text)


@click.command("transfer", short_help="Measure copies between pools against a contiguous copy.")
@_axis("--geometry", "geometries", tuple(GEOMETRIES), "Model whose rows move; may be given several times.")
@click.option("--page", "pages", multiple=True, type=click.IntRange(1),
              help=f"Tokens a page: {_listed(PAGES)}.")  # fmt: skip
@_axis("--layout", "layouts", LAYOUTS, "Layout of the host pool.")
@_axis("--io-backend", "io_backends", IO_BACKENDS, "How the path table is asked.")
@click.option("--engine", help="Let this engine run everything; what it cannot run is skipped.")
@_axis("--direction", "directions", [d.value for d in Direction],
       "backup, load (one call), load_layer (one call a layer), both (backup and load at once).")  # fmt: skip
@click.option(
    "--tokens", multiple=True, type=_Tokens(), help=f"Tokens that move: {_listed(TOKENS)}; 8K is 8192."
)
@_axis("--order", "orders", ORDERS, "Random pages, or runs of eight in random order.")
@click.option("--full", is_flag=True, help="The whole matrix (hours), cut down by the options above.")
@click.option("--targets", is_flag=True, help="The cells of the table of targets, and how they compare.")
@click.option("--busy", is_flag=True, help="Beside bf16 products of 8192^3 on another stream.")
@click.option("--calibrate", is_flag=True, help="Measure engines and keep the table that auto chooses by.")
@_axis("--peer", "peers", PEERS, "Measure it over the same pages.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw ratio to C by fragment size."
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
@click.option(
    "--repeats", type=click.IntRange(1), default=7, show_default=True, help="Timed runs; medians count."
)
@click.option(
    "--buffer-mib", type=click.IntRange(1), help="Least size of pools.  [default: 512, 64 on a CPU]"
)
@json_option
@click.pass_context
def command(  # noqa: PLR0917 - click passes options by name
    ctx: click.Context,
    geometries: tuple[str, ...],
    pages: tuple[int, ...],
    layouts: tuple[str, ...],
    io_backends: tuple[str, ...],
    engine: str | None,
    directions: tuple[str, ...],
    tokens: tuple[int, ...],
    orders: tuple[str, ...],
    full: bool,
    targets: bool,
    busy: bool,
    calibrate: bool,
    peers: tuple[str, ...],
    plot: Path | None,
    device: str,
    repeats: int,
    buffer_mib: int | None,
    as_json: bool,
) -> None:
    """Measure copies of pages between a device pool and a host pool, every byte checked first.

    Each figure is a ratio to C, a contiguous copy of as many pinned bytes, taken before and after in the same
    run. Without options a short set is measured (under a minute). Exit code 1 where bytes were wrong. Ctrl-C
    ends it early and shows what there is.
    """
    axes = {
        "geometries": geometries,
        "pages": pages,
        "layouts": layouts,
        "io_backends": io_backends,
        "directions": tuple(Direction(name) for name in directions),
        "tokens": tokens,
        "orders": orders,
    }
    if targets and (full or busy or any(axes.values())):
        raise click.UsageError("--targets has cells of its own; give it without --full, --busy or axes.")
    if plot is not None:
        from .plotting import check_picture

        check_picture(plot)
    if calibrate:
        _calibrate(device, as_json=as_json)
        return
    from .transfer_session import Session, Wish

    buffer_nbytes = None if buffer_mib is None else buffer_mib << 20
    wish = Wish(axes, full, targets, busy, engine, peers, device, repeats, buffer_nbytes)
    session = Session(wish)
    with _ticking("measuring", len(session)) as tick:
        result = session.run(tick)
    if plot is not None:
        from .transfer_plot import plot_ratios

        plot_ratios(result["rows"], f"{result['host']['device']}, ratio to {result['c_is']}", plot)
    if as_json:
        print_json(result)
    else:
        from .transfer_report import print_result

        print_result(result)
    if result["interrupted"]:
        click.echo("hicache-tier: interrupted", err=True)
        ctx.exit(_INTERRUPTED)
    if not all(row["verified"] for row in (*result["rows"], *result["busy"])):
        ctx.exit(_FINDING)


@contextmanager
def _ticking(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show progress; what is yielded is called once a step."""
    done = count(1)
    with progress(what, "cases") as report:

        def tick() -> None:
            if report:
                report(next(done), total)

        yield tick


def _calibrate(name: str, *, as_json: bool) -> None:
    from .transfer_calibration import Calibration, samples
    from .transfer_report import print_calibration
    from .transfer_session import find_device, host_facts

    device = find_device(name)
    calibration = Calibration(device)
    with _ticking("measuring engines", len(samples())) as tick:
        table = calibration.run(tick)
    path = table.store()
    result = {
        "host": host_facts(device),
        "stored": str(path),
        "unavailable": calibration.unavailable,
        "measurements": calibration.rows,
    }
    if as_json:
        print_json(result)
    else:
        print_calibration(result)
