"""The figures that this package means to reach on an H200, and what this machine reaches.

What SGLang 0.5.23 reaches with its own kernels, measured on the same kind of machine, is text for the reader.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from .transfer_cases import Direction, Selection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .transfer_cases import TransferCase

_ROWS = ("layer_first", "page_first")
_ALL = (*_ROWS, "page_first_direct")
_DIRECT = ("layer_first", "page_first_direct")
_WIDE = ("llama-3.1-8b", "qwen3-30b", "mla-bf16")


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the table.

    Attributes
    ----------
    name : str
    reach : mapping of str to float
        Least ratio to C, by direction. Cells are the product of these directions and the axes below.
    peer : str
        What SGLang 0.5.23 reaches.
    slowdown : float, optional
        The case is measured beside matrix products, which it may slow by this share at most, beyond what a
        bare copy costs them.
    submit_us : float, optional
        Most time a layer on the caller; ratios do not count then.
    """

    name: str
    reach: Mapping[str, float]
    geometries: tuple[str, ...]
    peer: str = ""
    pages: tuple[int, ...] = (64,)
    layouts: tuple[str, ...] = _ALL
    io_backend: str = "auto"
    tokens: int = 8192
    slowdown: float | None = None
    submit_us: float | None = None
    at_least: int = 0
    below: int = field(default=1 << 40)

    def cases(self) -> list[TransferCase]:
        """Return the cells; those of other fragment sizes than meant are left out."""
        selection = Selection(
            self.geometries,
            self.pages,
            self.layouts,
            (self.io_backend,),
            tuple(Direction(name) for name in self.reach),
            (self.tokens,),
            ("random",),
        )
        return [case for case in selection.cases() if self.at_least <= _page_run(case) < self.below]


TARGETS = (
    Target(
        "busy GPU, direct",
        {"backup": 0.95, "load": 0.95},
        ("llama-3.1-8b",),
        "0.48",
        layouts=_DIRECT,
        io_backend="direct",
        slowdown=0.04,
    ),
    Target(
        "busy GPU, page_first, auto",
        {"backup": 0.88, "load": 0.88},
        ("llama-3.1-8b",),
        "0.69, products +10 %",
        layouts=("page_first",),
        slowdown=0.06,
    ),
    Target(
        "idle, rows >= 512 B, pages >= 16",
        {"backup": 0.96, "load": 0.95},
        _WIDE,
        "0.95 / 0.82-0.92",
        pages=(16, 64),
    ),
    Target("idle, 256 tokens", {"load": 0.85}, ("llama-3.1-8b",), "0.73", tokens=256),
    Target(
        "idle, rows of 256 B, any page",
        {"backup": 0.94, "load": 0.93},
        ("llama-70b-tp8", "qwen3-30b-tp4"),
        "0.93-0.95 / 0.87-0.89",
        pages=(1, 16, 64),
        layouts=_ROWS,
    ),
    Target(
        "idle, page 1, rows >= 1024 B",
        {"backup": 0.94, "load": 0.92},
        _WIDE,
        "0.71-0.95 / 0.64-0.91",
        pages=(1,),
        layouts=_ROWS,
    ),
    Target(
        "idle, rows of 576 and 656 B",
        {"backup": 0.94, "load": 0.92},
        ("mla-fp8", "dsa-fp8"),
        "0.91-0.95 / 0.51-0.88",
        pages=(1, 16, 64),
        layouts=_ROWS,
    ),
    Target(
        "idle, indexer, 132 B a token",
        {"backup": 0.93, "load": 0.92},
        ("indexer",),
        "refused",
        pages=(16, 64),
        layouts=_ROWS,
    ),
    Target(
        "into page_first, page 64",
        {"backup": 0.95},
        (*_WIDE, "llama-70b-tp8", "mla-fp8", "dsa-fp8"),
        "0.80-0.95",
        layouts=("page_first",),
    ),
    Target(
        "direct, fragments >= 32 KiB",
        {"backup": 0.94, "load": 0.94},
        _WIDE,
        "0.16-0.65",
        pages=(16, 64),
        layouts=_DIRECT,
        io_backend="direct",
        at_least=32 << 10,
    ),
    Target(
        "auto, fragments of 4-16 KiB",
        {"backup": 0.80, "load": 0.80},
        ("qwen3-30b", "llama-70b-tp8", "mla-fp8"),
        "0.02-0.08",
        pages=(16, 64),
        layouts=_DIRECT,
        at_least=4 << 10,
        below=(16 << 10) + 1,
    ),
    Target("both directions at once, over 2 C", {"both": 0.85}, ("llama-3.1-8b",), ""),
    Target("submitting one layer", {"load_layer": 0.0}, ("llama-3.1-8b",), pages=(1, 64), submit_us=30.0),
)


def target_cases(*, busy: bool) -> list[TransferCase]:
    """Return the cells of all lines without repeats, those beside products or those on an idle GPU."""
    chosen = [target for target in TARGETS if (target.slowdown is not None) == busy]
    return list(dict.fromkeys(case for target in chosen for case in target.cases()))


def target_rows(
    rows: Sequence[dict[str, Any]], busy: Sequence[dict[str, Any]], peers: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Compare measured rows with the targets, and with the loop of copies where it was run.

    Returns
    -------
    list of dict
        One for each line and direction: `target`, `direction`, `peer`, `unit`, `reach`, `worst`, `median`
        (ratios to C, us, or times the peer's speed), `slowdown`, `slowdown_reach`, `cells`, `missed` (cells),
        `met` (None where no cell was measured).
    """
    found = []
    for target in TARGETS:
        measured = {_key(row): row for row in (rows if target.slowdown is None else busy)}
        for direction, reach in target.reach.items():
            cells = [
                measured[key]
                for case in target.cases()
                if case.direction.value == direction and (key := _key_of(case)) in measured
            ]
            found.append(_line(target, direction, reach, cells))
    loop = [row for row in peers if row["peer"] == "memcpy-loop" and row.get("ours_over_peer")]
    if loop:
        found.append(_loop_line(loop))
    return found


def _loop_line(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """No cell may be slower than a `cudaMemcpyAsync` loop over the same fragments."""
    values = [row["ours_over_peer"] for row in rows]
    missed = [f"{_place(row)} {row['ours_over_peer']:.2f}" for row in rows if row["ours_over_peer"] < 1]
    return {
        "target": "no slower than a cudaMemcpyAsync loop",
        "direction": "all",
        "peer": "",
        "unit": "x",
        "reach": 1.0,
        "worst": min(values),
        "median": median(values),
        "slowdown_reach": None,
        "slowdown": None,
        "cells": len(rows),
        "missed": missed,
        "met": not missed,
    }


def _line(target: Target, direction: str, reach: float, cells: list[dict[str, Any]]) -> dict[str, Any]:
    timed = target.submit_us is not None
    name = "submit_us" if timed else "ratio_to_c"
    values = [cell[name] for cell in cells if cell[name] is not None]
    slowdowns = [cell["gemm_slowdown_over_bare"] for cell in cells if "gemm_slowdown_over_bare" in cell]
    bar = target.submit_us if target.submit_us is not None else reach
    missed = [
        cell
        for cell in cells
        if cell[name] is None
        or (cell[name] > bar if timed else cell[name] < bar)
        or (target.slowdown is not None and cell["gemm_slowdown_over_bare"] > target.slowdown)
    ]
    return {
        "target": target.name,
        "direction": direction,
        "peer": target.peer,
        "unit": "us" if timed else "C",
        "reach": bar,
        "worst": (max if timed else min)(values, default=None),
        "median": median(values) if values else None,
        "slowdown_reach": target.slowdown,
        "slowdown": max(slowdowns, default=None),
        "cells": len(cells),
        "missed": [_short(cell) for cell in missed],
        "met": not missed if cells else None,
    }


def _short(cell: dict[str, Any]) -> str:
    ratio = cell["ratio_to_c"]
    return f"{_place(cell)} {'not verified' if ratio is None else f'{ratio:.2f}'}"


def _place(cell: dict[str, Any]) -> str:
    return f"{cell['geometry']} p{cell['page_tokens']} {cell['layout']}"


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(
        row[axis]
        for axis in ("geometry", "page_tokens", "layout", "io_backend", "direction", "tokens", "order")
    )


def _key_of(case: TransferCase) -> tuple[Any, ...]:
    return (*case.pools, case.io_backend, case.direction.value, case.tokens, case.order)


def _page_run(case: TransferCase) -> int:
    """Bytes of one page of one layer and component: the fragment where both sides keep it in one piece."""
    geometry = case.kv_geometry
    return geometry.rows * min(geometry.row_nbytes(component) for component in geometry.components)
