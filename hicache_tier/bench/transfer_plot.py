"""Ratio to C by fragment size, as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .plotting import check_plotting

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_COLOURS = {"backup": "#1f77b4", "load_layer": "#d62728", "load": "#ff7f0e", "both": "#2ca02c"}
_MARKERS = {"layer_first": "o", "page_first": "s", "page_first_direct": "D", "page_head": "^"}


def plot_ratios(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw every row that has a ratio: colour by direction, marker by layout, filled for random pages.

    Parameters
    ----------
    rows : sequence of dict
        As `bench transfer` returns them.
    title : str
    path : Path
        Written in the format of its suffix.
    """
    check_plotting()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for direction, colour in _COLOURS.items():
        for layout, marker in _MARKERS.items():
            found = [
                row
                for row in rows
                if row["ratio_to_c"] and (row["direction"], row["layout"]) == (direction, layout)
            ]
            if not found:
                continue
            axes.scatter(
                [row["fragment_nbytes"] for row in found],
                [row["ratio_to_c"] for row in found],
                s=26,
                marker=marker,
                facecolors=[colour if row["order"] == "random" else "none" for row in found],
                edgecolors=colour,
                label=f"{direction}, {layout}",
            )
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("shortest fragment in one piece on both sides, bytes")
    axes.set_ylabel("ratio to a contiguous copy (C)")
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, alpha=0.3)
    if axes.collections:
        axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=130)
