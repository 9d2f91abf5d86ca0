"""Throughput by page size, as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .plotting import check_plotting
from .transfer_report import nbytes_text

if TYPE_CHECKING:
    from pathlib import Path

_DIRECTIONS = {"put": "-", "get": "--", "mixed": ":"}
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")


def plot_storage(result: dict[str, Any], path: Path) -> None:
    """Draw GB/s by page size: one panel a mode and state of the page cache, with the bare loop and peers.

    Parameters
    ----------
    result : dict
        As `bench storage` returns it. Rows with checksums, several threads or depths are lines of their own.
    path : Path
        Written in the format of its suffix.
    """
    check_plotting()
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row["mode"], row["cache"]) for row in result["rows"])) or [("", "")]
    figure = Figure(figsize=(6.5 * len(panels), 5), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    found: dict[str, Any] = {}
    names: list[str] = []  # a contestant has one colour in all panels
    for axes, panel in zip(all_axes, panels, strict=True):
        lines = _lines(result, panel)
        names = list(dict.fromkeys([*names, *(name for name, _ in lines)]))
        for (name, direction), points in lines.items():
            axes.plot(
                *zip(*sorted(points), strict=True),
                _DIRECTIONS[direction],
                marker=".",
                color=_COLOURS[names.index(name) % len(_COLOURS)],
                label=f"{name}, {direction}",
            )
        if result["host"]["link_gb_s"]:
            axes.axhline(result["host"]["link_gb_s"], color="0.6", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("page")
        axes.set_ylabel("GB/s")
        axes.set_title(", ".join(panel), fontsize=10)
        axes.grid(visible=True, alpha=0.3)
        sizes = sorted({nbytes for points in lines.values() for nbytes, _ in points})
        axes.set_xticks(sizes, [nbytes_text(nbytes) for nbytes in sizes])
        axes.minorticks_off()
        found |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if found:
        figure.legend(found.values(), found.keys(), fontsize=7, loc="outside right upper")
    figure.savefig(path, dpi=130)


def _lines(result: dict[str, Any], panel: tuple[str, str]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Return the points of each contestant and direction of a panel."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}

    def add(name: str, direction: str, nbytes: int, gb_s: float) -> None:
        found.setdefault((name, direction), []).append((nbytes, gb_s))

    rows = [row for row in result["rows"] if (row["mode"], row["cache"]) == panel]
    for row in rows:
        settings = [f"{row[name]} {name}" for name in ("threads", "depth") if _varies(rows, row, name)]
        name = " ".join((row["engine"], *_kind(row), *settings))
        add(name, row["direction"], row["page_nbytes"], row["gb_s"])
        if row["engine"] == "posix" and not row["checksums"]:
            add(" ".join(("bare loop", *settings)), row["direction"], row["page_nbytes"], row["bare_gb_s"])
    for row in result["peers"]:
        if (row["mode"], row["cache"]) == panel:
            settings = [f"{row[name]} {name}" for name in ("threads", "depth") if _varies(rows, row, name)]
            add(" ".join((row["peer"], *settings)), row["direction"], row["page_nbytes"], row["peer_gb_s"])
    return found


def _kind(row: dict[str, Any]) -> list[str]:
    if row["encrypted"]:
        return ["encrypted"]
    return ["with checksums"] if row["checksums"] else []


def _varies(rows: list[dict[str, Any]], row: dict[str, Any], name: str) -> bool:
    """Whether rows of the same pages differ in this."""
    return len({other[name] for other in rows if other["page_nbytes"] == row["page_nbytes"]}) > 1
