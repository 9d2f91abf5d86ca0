"""The device route's part of the path table."""

from __future__ import annotations

import pytest

from hicache_tier import UnsupportedTransferError
from hicache_tier.device_paths import check_device_route, device_route_markdown, device_route_rows
from hicache_tier.geometry import PoolKind
from hicache_tier.layout import Layout

# design: pool, layout, sharded, works
CELLS = [
    (pool, layout, sharded, layout != "page_head" and (not sharded or layout == "layer_first"))
    for pool in ("mha", "mla", "indexer")
    for layout in ("layer_first", "page_first", "page_first_direct", "page_head")
    for sharded in (False, True)
]


@pytest.mark.parametrize(("pool", "layout", "sharded", "works"), CELLS)
def test_every_cell(pool, layout, sharded, works):
    arguments = PoolKind(pool), Layout(layout)
    rows = [
        row
        for row in device_route_rows()
        if (row["pool"], row["layout"], row["sharded"]) == (pool, layout, sharded)
    ]
    assert [(row["op"], row["ok"]) for row in rows] == [("put", works), ("get", works)]
    if works:
        check_device_route(*arguments, sharded=sharded)
        return
    with pytest.raises(UnsupportedTransferError, match=f"does not support {layout} layout") as caught:
        check_device_route(*arguments, sharded=sharded)
    assert rows[0]["reason"] in str(caught.value)
    assert caught.value.alternatives[0] == "layout='layer_first'"
    assert "a host pool" in caught.value.alternatives[-1]


def test_markdown():
    lines = device_route_markdown().splitlines()
    assert lines[0].endswith(
        "| fragments or staged page | staged page | fragments or staged page | no: rows are split by head |"
    )
    assert "layer-sharded | fragments or staged page | no:" in lines[1]
