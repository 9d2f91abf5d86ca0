"""Tables of `bench replay` for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_tier.cli.output import show, size, table

if TYPE_CHECKING:
    from collections.abc import Sequence

_OURS = "hicache-tier"


def print_result(result: dict[str, Any]) -> None:
    """Print a result."""
    trace, model, host = result["trace"], result["model"], result["host"]
    runs = [(_OURS, result), *((peer["peer"], peer) for peer in result["peers"])]
    show(
        f"{trace['name']}: {trace['requests']:,} requests, {trace['blocks']:,} blocks of 512 tokens, "
        f"{trace['distinct_blocks']:,} of them distinct, over {trace['seconds']:.0f} s.\n"
        f"{model['name']}: {model['pages_a_block']} page(s) of {size(model['page_nbytes'])} a block, "
        f"{model['layout']}; {host['cores']} cores, {host['filesystem']}; store {result['store']['engine']} "
        f"{result['store']['mode']}, peers through the page cache; copies between pools in one thread.\n",
        _hits(runs),
        _paths(runs),
        _latencies(runs),
    )
    for name, run in runs:
        show(_remarks(name, run))


def _hits(runs: Sequence[tuple[str, dict[str, Any]]]) -> Any:  # noqa: ANN401 - rich is imported lazily
    return table(
        "Hit rate by tier, of all pages of prompts; ideal: an LRU without a bound",
        (
            "store",
            ">device",
            ">host",
            ">store",
            ">all",
            ">ideal",
            ">seconds",
            ">of these held",
            ">wrong pages",
        ),
        (
            (
                name,
                *(f"{run['tiers'][tier]['hit_rate']:.2%}" for tier in ("device", "host", "store")),
                f"{run['hit_rate']:.2%}",
                f"{run['ideal_hit_rate']:.2%}",
                f"{run['seconds']:.1f}",
                f"{run['held_seconds']:.1f}",
                f"{run['wrong_pages']} of {run['checked_pages']:,}",
            )
            for name, run in runs
        ),
    )


def _paths(runs: Sequence[tuple[str, dict[str, Any]]]) -> Any:  # noqa: ANN401 - rich is imported lazily
    return table(
        "Paths: bytes, and GB/s while the path was busy",
        ("store", "path", ">bytes", ">busy s", ">GB/s"),
        (
            (
                name,
                way,
                size(path["bytes"]),
                f"{path['seconds']:.2f}",
                "-" if path["gb_s"] is None else f"{path['gb_s']:.2f}",
            )
            for name, run in runs
            for way, path in run["paths"].items()
        ),
    )


def _latencies(runs: Sequence[tuple[str, dict[str, Any]]]) -> Any:  # noqa: ANN401 - rich is imported lazily
    return table(
        "Latency, ms: what the engine waits for (match, load, insert), and calls of the store",
        ("store", "what", ">times", ">p50", ">p95", ">p99"),
        (
            (
                name,
                what,
                f"{numbers['count']:,}",
                *(f"{numbers[level]:.2f}" if level in numbers else "-" for level in ("p50", "p95", "p99")),
            )
            for name, run in runs
            for what, numbers in run["latency_ms"].items()
        ),
    )


def _remarks(name: str, run: dict[str, Any]) -> str:
    drops = ", ".join(f"{what} {count:,}" for what, count in run["drops"].items()) or "none"
    evicted = ", ".join(f"{why} {int(count):,}" for why, count in run["evictions"].items()) or "none"
    return (
        f"{name}: pages dropped: {drops}; evicted from the host tier: {evicted}; "
        f"not in the store at the end: {run['unsaved_pages']:,}."
    )
