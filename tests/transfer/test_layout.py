from __future__ import annotations

import pytest

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import KVGeometry, PoolKind
from hicache_tier.layout import Layout

MHA = KVGeometry.mha(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float16", page_tokens=5)
UNEVEN = KVGeometry.mha(
    num_layers=3, num_kv_heads=2, head_dim=4, v_head_dim=2, dtype="float16", page_tokens=5
)
MLA = KVGeometry.mla(num_layers=3, latent_dim=8, dtype="int8", page_tokens=5)


@pytest.mark.parametrize(
    ("layout", "shape", "fragments", "one_run"),
    [
        ("layer_first", (3, 7, 5, 2, 4), 6, False),
        ("page_first", (7, 5, 3, 2, 4), 2, True),
        ("page_first_direct", (7, 3, 5, 2, 4), 2, True),
        ("page_head", (7, 2, 5, 3, 4), 2, True),
    ],
)
def test_axes(layout, shape, fragments, one_run):
    order = Layout.parse(layout)
    assert order.host_shape(MHA, MHA.components[0], 7) == shape
    assert len(order.fragments(MHA, 7)) == fragments
    assert not order.is_one_run(MHA)  # K and V lie in two regions
    if layout != "page_head":
        assert order.is_one_run(MLA) == one_run
    assert order.splits_rows == (layout == "page_head")
    assert sum(f.nbytes for f in order.fragments(UNEVEN, 7)) == UNEVEN.page_nbytes


def test_stored_pages():
    assert Layout.PAGE_FIRST.page_shape(MHA) == (2, 5, 3, 2, 4)
    assert Layout.PAGE_FIRST.page_dimension_names(MHA) == ("kv", "token", "layer", "head", "dim")
    assert Layout.PAGE_FIRST.page_shape(UNEVEN) == (UNEVEN.page_nbytes,)
    assert Layout.PAGE_FIRST.page_dimension_names(UNEVEN) == ("byte",)
    assert Layout.LAYER_FIRST.page_shape(MLA) == (3, 5, 8)
    assert Layout.LAYER_FIRST.page_dimension_names(MLA) == ("layer", "token", "dim")


def test_only_heads_can_be_split():
    for layout in Layout:
        assert not layout.why_not(PoolKind.MHA)
        for kind in (PoolKind.MLA, PoolKind.INDEXER):
            assert bool(layout.why_not(kind)) == (layout is Layout.PAGE_HEAD)


@pytest.mark.parametrize("value", ["page", "PAGE_FIRST", None, 3])
def test_unknown(value):
    with pytest.raises(InvalidArgumentError, match=r"is not known.*Allowed: layer_first"):
        Layout.parse(value)
