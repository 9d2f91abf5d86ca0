"""The device route's part of the path table: pages between a device and storage, without a host pool.

Pure, as `paths.py`: whether an engine can move a device's memory is asked elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import UnsupportedTransferError
from .geometry import PoolKind
from .layout import Layout

if TYPE_CHECKING:
    from typing import Any

DEVICE_ROUTE = "device"
OPS = ("put", "get")

_EITHER, _STAGED = "fragments or staged page", "staged page"
_BY_HEAD = "rows are split by head"
_LAYERS = "a page of some layers is spread over other ranks' pages"
_CELLS: dict[bool, dict[Layout, tuple[bool, str]]] = {
    False: {
        Layout.LAYER_FIRST: (True, _EITHER),
        Layout.PAGE_FIRST: (True, _STAGED),
        Layout.PAGE_FIRST_DIRECT: (True, _EITHER),
        Layout.PAGE_HEAD: (False, _BY_HEAD),
    },
    True: {
        Layout.LAYER_FIRST: (True, _EITHER),
        Layout.PAGE_FIRST: (False, _LAYERS),
        Layout.PAGE_FIRST_DIRECT: (False, _LAYERS),
        Layout.PAGE_HEAD: (False, _BY_HEAD),
    },
}


def check_device_route(pool: PoolKind, layout: Layout, *, sharded: bool) -> None:
    """Refuse a route that the table does not have.

    Parameters
    ----------
    pool : PoolKind
    layout : Layout
        The store's.
    sharded : bool
        Whether the device pool holds only some layers.

    Raises
    ------
    UnsupportedTransferError
        Lists the layouts that work.
    """
    why = why_not(pool, layout, sharded=sharded)
    if not why:
        return
    works = [order.value for order in Layout if not why_not(pool, order, sharded=sharded)]
    title = "The layer-sharded device route" if sharded else "The device route"
    raise UnsupportedTransferError(
        f"{title} does not support {layout.value} layout: {why}",
        layout=layout.value,
        io_backend=DEVICE_ROUTE,
        sharded=sharded,
        alternatives=(*(f"layout='{name}'" for name in works), "a host pool: backup, then put"),
    )


def why_not(pool: PoolKind, layout: Layout, *, sharded: bool) -> str:
    """Return why the table does not have a route, or ""."""
    ok, reason = _CELLS[sharded][layout]
    return layout.why_not(pool) or ("" if ok else reason)


def device_route_rows() -> list[dict[str, Any]]:
    """Return the table as plain rows, one for each pool, layout and sharding.

    Keys: `pool`, `layout`, `io_backend` (`device`), `sharded`, `op` (`put` and `get`), `ok`, `reason`.
    """
    rows = []
    for pool in PoolKind:
        for layout in Layout:
            for sharded, cells in _CELLS.items():
                why = why_not(pool, layout, sharded=sharded)
                reason = why or cells[layout][1]
                rows += [
                    {
                        "pool": pool.value,
                        "layout": layout.value,
                        "io_backend": DEVICE_ROUTE,
                        "sharded": sharded,
                        "op": op,
                        "ok": not why,
                        "reason": reason,
                    }
                    for op in OPS
                ]
    return rows


def device_route_markdown() -> str:
    """Return the lines that the README's path table has for the device route."""
    lines = []
    for sharded, cells in _CELLS.items():
        title = "device route (GPU <-> store), layer-sharded" if sharded else "device route (GPU <-> store)"
        texts = (reason if ok else f"no: {reason}" for ok, reason in (cells[order] for order in Layout))
        lines.append(f"| {title} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"
