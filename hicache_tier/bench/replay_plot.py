"""The timeline of a replay, as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .plotting import check_plotting

if TYPE_CHECKING:
    from pathlib import Path

_TIERS = {"device": "#9467bd", "host": "#1f77b4", "store": "#2ca02c"}
_COLOURS = ("#1f77b4", "#d62728", "#ff7f0e", "#8c564b")
_SMOOTH = 8  # points over which GB/s are taken


def plot_replay(result: dict[str, Any], path: Path) -> None:
    """Draw hit rates by tier against the ideal, and the store's traffic and load latency against peers.

    Parameters
    ----------
    result : dict
        As `bench replay` returns it.
    path : Path
        Written in the format of its suffix.
    """
    check_plotting()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    rates, traffic, latency = figure.subplots(3, 1)
    runs = [("hicache-tier", result), *((peer["peer"], peer) for peer in result["peers"])]
    ours = _Columns(result["timeline"])
    rates.stackplot(
        ours["requests"],
        *(ours[f"{tier}_hit_rate"] for tier in _TIERS),
        labels=list(_TIERS),
        colors=list(_TIERS.values()),
        alpha=0.7,
    )
    rates.plot(ours["requests"], ours["ideal_hit_rate"], "k--", linewidth=1, label="ideal")
    for (name, run), colour in zip(runs, _COLOURS, strict=False):
        columns = _Columns(run["timeline"])
        if run is not result:
            total = sum(columns[f"{tier}_hit_rate"] for tier in _TIERS)
            rates.plot(columns["requests"], total, color=colour, linewidth=1, label=name)
        for verb, style in (("put", "-"), ("get", "--")):
            traffic.plot(
                columns["seconds"],
                columns.rate(f"{verb}_bytes"),
                style,
                color=colour,
                label=f"{name}, {verb}",
            )
        loads = columns["load_ms"] > 0
        latency.plot(
            columns["requests"][loads], columns["load_ms"][loads], ".", color=colour, label=name, markersize=4
        )
    _dress(rates, "requests", "hit rate since the start", result["trace"]["name"])
    _dress(traffic, "seconds", "GB/s to and from the store", "")
    latency.set_yscale("log")
    _dress(latency, "requests", "load of a prompt, ms", "")
    figure.savefig(path, dpi=130)


class _Columns:
    """The points of a timeline as arrays by name."""

    def __init__(self, points: list[dict[str, Any]]) -> None:
        self._points = points

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return np.array([point[name] for point in self._points], float)

    def rate(self, name: str) -> np.ndarray[Any, Any]:
        """Return GB/s between points some apart, from sums of bytes."""
        nbytes, seconds = self[name], self["seconds"]
        before = np.maximum(np.arange(len(nbytes)) - _SMOOTH, 0)
        passed = np.maximum(seconds - seconds[before], 1e-9)
        return np.where(before < np.arange(len(nbytes)), (nbytes - nbytes[before]) / passed / 1e9, 0.0)


def _dress(axes: Any, x: str, y: str, title: str) -> None:  # noqa: ANN401 - matplotlib has no types
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
