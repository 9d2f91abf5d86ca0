"""`hicache-tier inspect`: what a store holds."""

from __future__ import annotations

import time
from typing import Any

import click

from hicache_tier.layout import Layout

from .app import FINDING
from .output import age, count, json_option, print_json, show, show_records, size

_COUNTS = ("rank", "writer", "pool", "state", ">pages", ">bytes", ">capacity", ">full")
_CHAINS = ("created", "used", ">prefixes", ">longest", ">orphans")
_FIRST = ("model", "revision", "adapter")
_APART = ("pools", "parallel", "format", "version", "encryption", "axis_order")


@click.command("inspect", short_help="Show what a store holds.")
@click.argument("root", type=click.Path(exists=True, file_okay=False))
@json_option
@click.pass_context
def command(ctx: click.Context, root: str, as_json: bool) -> None:
    """Show the namespaces and partitions of the store at ROOT; works while others write to it.

    A prefix is a chain of pages from the beginning of a text. An orphan is a page whose predecessor is gone,
    so that no prefix leads to it. Exit code 1 where something is damaged.
    """
    from hicache_tier_storage.inspection import inspect_root

    found = inspect_root(root)
    partitions = [p for n in found["namespaces"] for p in n["partitions"]]
    if as_json:
        print_json(found)
    else:
        _show(root, found, partitions)
    if any(part.get("damage") for part in [*found["namespaces"], *partitions]):
        ctx.exit(FINDING)


def _show(root: str, found: dict[str, Any], partitions: list[dict[str, Any]]) -> None:
    for namespace in found["namespaces"]:
        _show_namespace(namespace)
    pages, nbytes = sum(p["pages"] for p in partitions), sum(p["bytes"] for p in partitions)
    spaces = count(len(found["namespaces"]), "namespace")
    show(f"{spaces}, {count(pages, 'page')}, {size(nbytes)} in {root}")
    for path in found.get("foreign", []):
        show(f"not the store's: {path}")


def _show_namespace(namespace: dict[str, Any]) -> None:
    from rich.text import Text

    show(Text.assemble(("namespace       ", "dim"), (namespace["namespace"], "bold")))
    for name, value in _lines(namespace["identity"]):
        show(Text.assemble((f"{name:<16}", "dim"), value))
    columns = (*_COUNTS, *_CHAINS)
    show_records(columns, [_row(partition) for partition in namespace["partitions"]])
    damage = [*namespace.get("damage", [])]
    for partition in namespace["partitions"]:
        place = f"{partition['rank']}-w{partition['writer']}/{partition['pool']}"
        damage += [f"{place}: {what}" for what in partition.get("damage", [])]
    for line in damage:
        show(Text.assemble(("damage  ", "red"), line))


def _lines(identity: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the identity as lines for people; what is unset is left out."""
    names = [*_FIRST, *(name for name in identity if name not in _FIRST + _APART)]
    unset: tuple[object, ...] = (None, "", [], {})
    lines = [(n.replace("_", " "), str(identity[n])) for n in names if identity.get(n) not in unset]
    if identity.get("axis_order"):
        lines.append(("layout", _layouts(identity["axis_order"])))
    if identity.get("parallel"):
        lines.append(("parallel", ", ".join(f"{k} {v}" for k, v in identity["parallel"].items())))
    if identity.get("encryption"):
        lines.append(("encryption", str(identity["encryption"].get("algorithm"))))
    lines += [(f"{name} page", _geometry(pool)) for name, pool in identity.get("pools", {}).items()]
    return lines


def _layouts(axes: str) -> str:
    """Name the layouts whose pages have this order of axes."""
    return " or ".join(layout.value for layout in Layout.with_page_axes(axes)) or f"axes {axes}"


def _geometry(geometry: dict[str, Any]) -> str:
    parts = ", ".join(f"{c['name']} {c['heads']} x {c['width']}" for c in geometry["components"])
    return (
        f"{geometry['kind']}, {geometry['page_tokens']} tokens, {geometry['num_layers']} layers, "
        f"{parts}, {geometry['dtype']}"
    )


def _row(partition: dict[str, Any]) -> tuple[object, ...]:
    capacity = partition["capacity_bytes"]
    full = f"{100 * partition['bytes'] / capacity:.0f} %" if capacity else "-"
    chains = partition.get("chains") or {}
    return (
        partition["rank"],
        f"w{partition['writer']}",
        partition["pool"],
        _state(partition),
        partition["pages"],
        size(partition["bytes"]),
        size(capacity),
        full,
        _ago(partition.get("oldest_created"), partition.get("newest_created")),
        _ago(partition.get("newest_accessed"), None),
        chains.get("leaves", "-"),
        count(chains["longest"], "page") if chains.get("longest") else "-",
        chains.get("orphans", "-"),
    )


def _state(partition: dict[str, Any]) -> str:
    if partition.get("writer_live"):
        return "in use"
    return {True: "closed", False: "ended unclosed"}.get(partition.get("clean"), "-")  # type: ignore[arg-type]


def _ago(first: float | None, last: float | None) -> str:
    """Return how long ago, in words; both ends where they differ."""
    if first is None:
        return "-"
    now = time.time()
    words = age(now - first)
    until = words if last is None else age(now - last)
    return f"{words} ago" if until == words else f"{words} to {until} ago"
