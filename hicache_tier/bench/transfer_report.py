"""Tables of `bench transfer` for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_tier.cli.output import mark, show, table

if TYPE_CHECKING:
    from collections.abc import Sequence

_CASE = ("geometry", ">page", "layout", "io_backend", "direction", ">tokens", "order")


def print_result(result: dict[str, Any]) -> None:
    """Print whatever parts a result has."""
    host, c = result["host"], result["c"]
    title = ", ".join(f"{name} {value}" for name, value in host.items() if value is not None)
    ceilings = ", ".join(f"{name} {value:.1f} GB/s" for name, value in c.items())
    show(f"{title}\nC, {result['c_is']}: {ceilings}\n")
    if result["rows"]:
        show(_rows(result["rows"]))
    if result["busy"]:
        show(_busy(result["busy"]))
    if result["peers"]:
        show(_peers(result["peers"]))
    if result["targets"]:
        show(_targets(result["targets"]))
        for line in result["targets"]:
            if line["missed"]:
                show(f"{line['target']}, {line['direction']}, missed: {'; '.join(line['missed'])}")
    for reason, cases in _by_reason(result["skipped"]).items():
        show(f"Skipped {len(cases)}: {reason}\n  e.g. {', '.join(str(value) for value in cases[0])}")
    for note in result["notes"]:
        show(note)


def print_calibration(result: dict[str, Any]) -> None:
    """Print what engines reached, and where the table was kept."""
    rows = result["measurements"]
    names = sorted({name for row in rows for name in row["ratios"]})
    show(
        table(
            f"Engines on {result['host']['device']}, as ratios to C",
            (
                "direction",
                "layout",
                ">page",
                ">fragment",
                ">count",
                ">window",
                *(f">{name}" for name in names),
            ),
            (
                (
                    row["direction"],
                    row["layout"],
                    row["page_tokens"],
                    nbytes_text(row["fragment_nbytes"]),
                    row["count"],
                    nbytes_text(row["window_nbytes"]),
                    *(_number(row["ratios"].get(name), 3) for name in names),
                )
                for row in rows
            ),
        ),
        f"Kept in {result['stored']}; `auto` chooses by it from now on.",
        *(f"Engine {name} was not measured: {why}." for name, why in result["unavailable"].items()),
    )


def _rows(rows: Sequence[dict[str, Any]]) -> Any:  # noqa: ANN401 - rich is imported lazily
    return table(
        "Transfers",
        (*_CASE, "engine", ">fragment", ">GB/s", ">of C", ">submit us", ">1st layer us", "verified"),
        (
            (
                *_facts(row),
                row["engine"],
                nbytes_text(row["fragment_nbytes"]),
                _number(row["gb_s"], 1),
                _number(row["ratio_to_c"], 3),
                _number(row["submit_us"], 1),
                _number(row.get("first_layer_us"), 0),
                mark(row["verified"]),
            )
            for row in rows
        ),
    )


def _busy(rows: Sequence[dict[str, Any]]) -> Any:  # noqa: ANN401 - rich is imported lazily
    return table(
        "Beside bf16 products of 8192^3; how much they slow down, and what a bare contiguous copy costs them",
        (*_CASE, "engine", ">GB/s", ">of C", ">bare of C", ">slowed", ">bare", ">over bare"),
        (
            (
                *_facts(row),
                row["engine"],
                _number(row.get("gb_s"), 1),
                _number(row.get("ratio_to_c"), 3),
                _number(row.get("bare_ratio_to_c"), 3),
                _percent(row.get("gemm_slowdown")),
                _percent(row.get("gemm_slowdown_bare")),
                _percent(row.get("gemm_slowdown_over_bare")),
            )
            for row in rows
        ),
    )


def _peers(rows: Sequence[dict[str, Any]]) -> Any:  # noqa: ANN401 - rich is imported lazily
    return table(
        "Peers over the same pages",
        ("peer", *_CASE, ">GB/s", ">of C", ">ours / peer", "remark"),
        (
            (
                row["peer"],
                *_facts(row),
                _number(row["gb_s"], 1),
                _number(row["ratio_to_c"], 3),
                _number(row.get("ours_over_peer"), 2),
                row.get("reason") or ("" if row["verified"] else "wrong bytes"),
            )
            for row in rows
        ),
    )


def _targets(rows: Sequence[dict[str, Any]]) -> Any:  # noqa: ANN401 - rich is imported lazily
    return table(
        "Targets on an H200, as ratios to C; worst and median over the cells of a line",
        ("case", "direction", "SGLang", ">reach", ">worst", ">median", ">cells", ">missed", "met"),
        (
            (
                row["target"],
                row["direction"],
                row["peer"],
                _bar(row["reach"], row["unit"], row["slowdown_reach"]),
                _bar(row["worst"], row["unit"], row["slowdown"]),
                _number(row["median"], 1 if row["unit"] == "us" else 3),
                row["cells"],
                len(row["missed"]),
                "not measured" if row["met"] is None else mark(row["met"]),
            )
            for row in rows
        ),
    )


def _facts(row: dict[str, Any]) -> tuple[str, ...]:
    names = (name.removeprefix(">") for name in _CASE)
    return tuple(str(row["page_tokens" if name == "page" else name]) for name in names)


def _by_reason(skipped: Sequence[dict[str, Any]]) -> dict[str, list[tuple[str, ...]]]:
    found: dict[str, list[tuple[str, ...]]] = {}
    for row in skipped:
        found.setdefault(row["reason"], []).append(_facts(row))
    return found


def _bar(value: float | None, unit: str, slowdown: float | None) -> str:
    suffix = {"us": " us", "x": " x"}.get(unit, "") if value is not None else ""
    text = _number(value, 1 if unit == "us" else 3) + suffix
    return text if slowdown is None else f"{text}, {slowdown:+.1%}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def nbytes_text(nbytes: int) -> str:
    """Return bytes in the largest binary unit that leaves a whole number."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"
