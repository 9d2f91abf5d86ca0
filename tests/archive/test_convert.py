"""Conversions equal the reference: what two host pools say their pages mean, element by element."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool
from hicache_tier.layout import Layout
from hicache_tier.testing.array_pool import read_page, write_page
from hicache_tier_storage.archive.convert import HeadRange, Shape, convert_pages

FEW = settings(max_examples=40, deadline=None)
LAYOUTS = st.sampled_from(list(Layout))


def logical(pool, page):
    """Return a page as {(component, layer, token, head): vector}, by the pool's own strides."""
    found = {}
    for name, view in pool.page_views(page).items():
        names = pool.layout.component_dimension_names(pool.geometry)
        for index in np.ndindex(*view.shape[:-1]):
            place = dict(zip(names, index, strict=False))
            found[name, place["layer"], place.get("token", 0), place.get("head", 0)] = view[index]
    return found


def filled(geometry, layout, count, seed):
    pool = HostPool(geometry, layout, count, pinned=False)
    random = np.random.default_rng(seed)
    for page in range(count):
        write_page(pool, page, random.bytes(geometry.page_nbytes))
    return pool


def stored(pool):
    raw = b"".join(read_page(pool, page) for page in range(pool.num_pages))
    return np.frombuffer(raw, np.uint8).reshape(pool.num_pages, -1).copy()


def restored(geometry, layout, pages):
    pool = HostPool(geometry, layout, len(pages), pinned=False)
    for at, page in enumerate(pages):
        write_page(pool, at, page.tobytes())
    return pool


def same(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@FEW
@given(
    old=LAYOUTS,
    new=LAYOUTS,
    wide=st.booleans(),
    dtype=st.sampled_from(["bfloat16", "float8_e5m2", "float32"]),
)
def test_layouts(old, new, wide, dtype):
    geometry = KVGeometry.mha(
        num_layers=3, num_kv_heads=2, head_dim=4, v_head_dim=6 if wide else None, dtype=dtype, page_tokens=5
    )
    pool = filled(geometry, old, 3, 1)
    out = np.zeros((3, geometry.page_nbytes), np.uint8)
    fits = convert_pages(Shape(geometry, old), stored(pool), Shape(geometry, new), out, HeadRange(0, 0, 2))
    assert fits.all()
    other = restored(geometry, new, out)
    for page in range(3):
        a, b = logical(pool, page), logical(other, page)
        assert a.keys() == b.keys()
        assert all(same(a[place], b[place]) for place in a)


@FEW
@given(
    layout=st.sampled_from([Layout.PAGE_FIRST, Layout.LAYER_FIRST]),
    new=st.sampled_from([Layout.PAGE_FIRST, Layout.LAYER_FIRST]),
    few=st.integers(1, 4),
    times=st.integers(1, 4),
    joins=st.booleans(),
)
def test_page_sizes_of_latents(layout, new, few, times, joins):
    old_tokens, new_tokens = (few, few * times) if joins else (few * times, few)
    a = KVGeometry.mla(num_layers=2, latent_dim=6, dtype="float16", page_tokens=old_tokens)
    b = KVGeometry.mla(num_layers=2, latent_dim=6, dtype="float16", page_tokens=new_tokens)
    pool = filled(a, layout, 2 * times, 2)
    out = np.zeros((2 * times * old_tokens // new_tokens, b.page_nbytes), np.uint8)
    convert_pages(Shape(a, layout), stored(pool), Shape(b, new), out, HeadRange(0, 0, 1))
    other = restored(b, new, out)
    old_pages = [logical(pool, page) for page in range(pool.num_pages)]
    new_pages = [logical(other, page) for page in range(other.num_pages)]
    for token in range(2 * times * old_tokens):
        for layer in range(2):
            x = old_pages[token // old_tokens]["latent", layer, token % old_tokens, 0]
            y = new_pages[token // new_tokens]["latent", layer, token % new_tokens, 0]
            assert same(x, y)


@FEW
@given(old=LAYOUTS, new=LAYOUTS, source=st.integers(0, 3), target=st.integers(0, 3), data=st.data())
def test_heads(old, new, source, target, data):
    count = data.draw(st.integers(1, 4 - max(source, target)))
    a = KVGeometry.mha(num_layers=2, num_kv_heads=4, head_dim=4, dtype="bfloat16", page_tokens=3)
    pool = filled(a, old, 2, 3)
    out = np.full((2, a.page_nbytes), 0x5A, np.uint8)
    before = [logical(restored(a, new, out.copy()), page) for page in range(2)]
    convert_pages(Shape(a, old), stored(pool), Shape(a, new), out, HeadRange(source, target, count))
    other = restored(a, new, out)
    for page in range(2):
        x, y = logical(pool, page), logical(other, page)
        for name, layer, token, head in y:
            inside = target <= head < target + count
            wanted = (
                x[name, layer, token, head - target + source]
                if inside
                else before[page][name, layer, token, head]
            )
            assert same(wanted, y[name, layer, token, head])


@FEW
@given(
    old=st.sampled_from(["float32", "float16", "bfloat16"]),
    new=st.sampled_from(["float32", "float16", "bfloat16"]),
    layouts=st.tuples(LAYOUTS, LAYOUTS),
    seed=st.integers(0, 3),
)
def test_dtypes(old, new, layouts, seed):
    a, b = (
        KVGeometry.mha(num_layers=2, num_kv_heads=2, head_dim=4, dtype=dtype, page_tokens=3)
        for dtype in (old, new)
    )
    pool = filled(a, layouts[0], 3, seed)
    out = np.zeros((3, b.page_nbytes), np.uint8)
    fits = convert_pages(Shape(a, layouts[0]), stored(pool), Shape(b, layouts[1]), out, HeadRange(0, 0, 2))
    other = restored(b, layouts[1], out)
    for page in range(3):
        x, y = logical(pool, page), logical(other, page)
        for place, value in x.items():
            assert torch.equal(value.to(b.dtype.torch).nan_to_num(7.0), y[place].nan_to_num(7.0))
        lost = any((value.isfinite() & value.to(b.dtype.torch).isinf()).any() for value in x.values())
        assert fits[page] == (not lost)


@pytest.mark.parametrize(
    ("value", "fits"), [(65504.0, True), (65520.0, False), (float("inf"), True), (float("nan"), True)]
)
def test_what_does_not_fit_is_told(value, fits):
    a, b = (
        KVGeometry.mla(num_layers=1, latent_dim=4, dtype=d, page_tokens=2) for d in ("float32", "float16")
    )
    pages = np.ones((2, 8), np.float32)
    pages[1, 5] = value
    out = np.zeros((2, b.page_nbytes), np.uint8)
    told = convert_pages(
        Shape(a, Layout.PAGE_FIRST),
        pages.view(np.uint8),
        Shape(b, Layout.PAGE_FIRST),
        out,
        HeadRange(0, 0, 1),
    )
    assert told.tolist() == [True, fits]
