"""`hicache-tier inspect`: what a store holds."""

from __future__ import annotations

from typing import Any

import click

from .output import age, json_option, print_json, show, size, table

_COUNTS = ("rank", "writer", "pool", ">pages", ">bytes", ">capacity", ">full")
_AGES = ("newest", "oldest", ">prefixes")


@click.command("inspect", short_help="Show what a store holds.")
@click.argument("root", type=click.Path(exists=True, file_okay=False))
@json_option
def command(root: str, as_json: bool) -> None:
    """Show the namespaces and partitions of the store at ROOT; works while others write to it."""
    from hicache_tier_storage.inspection import inspect_root

    found = inspect_root(root)
    if as_json:
        print_json(found)
        return
    for namespace in found["namespaces"]:
        _show_namespace(namespace)
    pages = sum(p["pages"] for n in found["namespaces"] for p in n["partitions"])
    nbytes = sum(p["bytes"] for n in found["namespaces"] for p in n["partitions"])
    show(f"{len(found['namespaces'])} namespaces, {pages} pages, {size(nbytes)} in {root}")


def _show_namespace(namespace: dict[str, Any]) -> None:
    from rich.text import Text

    show(Text.assemble(("namespace ", "dim"), (namespace["namespace"], "bold")))
    for name, value in _flat(namespace["identity"]):
        show(Text.assemble((f"  {name:<16}", "dim"), str(value)))
    show(table(None, _COUNTS + _AGES, (_row(partition) for partition in namespace["partitions"])))


def _flat(identity: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the identity as lines for people: what is unset is left out, one level of nesting is joined."""
    lines = []
    for name, value in identity.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k}={v}" for k, v in value.items() if v is not None)  # noqa: PLW2901
        if value not in (None, "", [], {}):
            lines.append((name, value))
    return lines


def _row(partition: dict[str, Any]) -> tuple[object, ...]:
    capacity = partition["capacity_bytes"]
    full = f"{100 * partition['bytes'] / capacity:.0f} %" if capacity else "-"
    return (
        partition["rank"],
        partition["writer"],
        partition["pool"],
        partition["pages"],
        size(partition["bytes"]),
        size(capacity),
        full,
        _age(partition.get("newest_age_seconds")),
        _age(partition.get("oldest_age_seconds")),
        partition["chains"]["roots"],
    )


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else age(seconds)
