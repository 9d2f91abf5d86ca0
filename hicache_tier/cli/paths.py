"""`hicache-tier paths`: the path table as it is on this machine."""

from __future__ import annotations

from typing import Any

import click

from .output import json_option, mark, print_json, show, table


@click.command("paths", short_help="Show which transfers work here, and why others do not.")
@json_option
def command(as_json: bool) -> None:
    """Show which transfers this machine can do, by which engine, and why others are refused.

    The second table is the device route, between a GPU and a store without a host pool: `hicache-tier probe`
    says which engine carries it in a directory. With --json the first table alone.
    """
    from hicache_tier.device_paths import device_route_rows
    from hicache_tier.machine import default_device, machine_capabilities
    from hicache_tier.paths import path_rows

    rows = path_rows(machine_capabilities(default_device()))
    if as_json:
        print_json(rows)
        return
    columns = ("pool", "layout", "io_backend", "layers", "op", "ok", "engine", "reason")
    routes = map(_route_cells, (row for row in device_route_rows() if row["op"] == "put"))
    route_columns = ("pool", "layout", "layers", "ok", "how, or why not")
    show(
        table("Transfers on this machine", columns, map(_cells, _both_ways(rows))),
        table("Device route, the same for put and get", route_columns, routes),
    )


def _both_ways(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the rows of backup and load where they say the same but for the word."""
    joined: list[dict[str, Any]] = []
    for row in rows:
        reason = (row["reason"] or "").replace(f" {row['op']} ", " ")
        same = {"op": "both", "reason": reason}
        if (
            joined
            and joined[-1] | same == row | same | {"plain": joined[-1]["plain"]}
            and joined[-1]["plain"] == reason
        ):
            joined[-1] |= same
        else:
            joined.append(row | {"plain": reason})
    return joined


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        row["pool"],
        row["layout"],
        row["io_backend"],
        "sharded" if row["sharded"] else "all",
        row["op"],
        mark(row["ok"]),
        row["engine"] or "-",
        row["reason"] or "",
    )


def _route_cells(row: dict[str, Any]) -> tuple[object, ...]:
    layers = "sharded" if row["sharded"] else "all"
    return row["pool"], row["layout"], layers, mark(row["ok"]), row["reason"]
