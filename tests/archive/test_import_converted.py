"""Imports that change layout, page size, ranks or dtype, against the values that were exported."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hicache_tier.geometry import KVGeometry
from hicache_tier.keys import page_keys
from hicache_tier.layout import Layout
from hicache_tier.testing.array_pool import keys_of
from hicache_tier_storage.archive import Conversion, Selection, export_archive, import_archive

HEADS, LAYERS, DIM, TOKENS = 8, 2, 4, 8
LAYOUTS = [layout.value for layout in Layout]


def model(tokens, heads=HEADS, seed=0):
    """K and V of a whole prompt, `[component, layer, token, head, dim]`, as uint16 storage of bfloat16."""
    return np.random.default_rng(seed).integers(0, 1 << 16, (2, LAYERS, tokens, heads, DIM), np.uint16)


def geometry(heads, page_tokens=TOKENS, dtype="bfloat16"):
    return KVGeometry.mha(
        num_layers=LAYERS, num_kv_heads=heads, head_dim=DIM, dtype=dtype, page_tokens=page_tokens
    )


def page_of(values, layout, first, page_tokens, heads):
    """Bytes of one stored page, by an order of axes written out here."""
    part = values[:, :, first : first + page_tokens, heads.start : heads.stop]  # c l t h d
    order = {
        "page_first": (0, 2, 1, 3, 4),
        "layer_first": (0, 1, 2, 3, 4),
        "page_first_direct": (0, 1, 2, 3, 4),
        "page_head": (0, 3, 2, 1, 4),
    }[layout]
    return np.ascontiguousarray(part.transpose(order)).tobytes()


def pages_of(values, keys, layout, page_tokens, heads):
    return {key: page_of(values, layout, at * page_tokens, page_tokens, heads) for at, key in enumerate(keys)}


def share(rank, size, heads=HEADS):
    return range(rank * heads // size, (rank + 1) * heads // size)


@pytest.fixture
def ranks(shop):
    """Export of one prompt under some tensor-parallel size: the archive, the keys, the values."""

    def make(size, layout="page_first", pages=6, name="old"):
        values, keys = model(pages * TOKENS), keys_of("p", pages)
        for rank in range(size):
            heads = share(rank, size)
            data = pages_of(values, keys, layout, TOKENS, heads)
            shop.fill(name, geometry(len(heads)), layout, keys, data=data, tp=(rank, size))
        export_archive(shop.folder / name, shop.folder / "archive")
        return shop.folder / "archive", keys, values

    return make


@pytest.mark.parametrize("new", LAYOUTS)
@pytest.mark.parametrize("old", LAYOUTS)
def test_layouts(shop, ranks, old, new):
    archive, keys, values = ranks(1, old)
    report = import_archive(archive, shop.folder / "new", conversion=Conversion.parse(layout=new))
    assert (report.imported, report.refused) == (len(keys), {})
    found = shop.read(shop.folder / "new", keys, geometry(HEADS), new)
    assert found == pages_of(values, keys, new, TOKENS, range(HEADS))


@pytest.mark.parametrize(("old", "new"), [(8, 4), (4, 1), (8, 1), (1, 8), (2, 4)])
def test_tensor_parallel_sizes(shop, ranks, old, new):
    archive, keys, values = ranks(old)
    conversion = Conversion.parse(tp=new, layout="layer_first")
    report = import_archive(archive, shop.folder / "new", conversion=conversion)
    assert (report.imported, report.refused) == (new * len(keys), {})
    for rank in range(new):
        heads = share(rank, new)
        found = shop.read(shop.folder / "new", keys, geometry(len(heads)), "layer_first", tp=(rank, new))
        assert found == pages_of(values, keys, "layer_first", TOKENS, heads)


def test_a_rank_that_is_missing_refuses_what_needs_it(shop, ranks):
    archive, keys, values = ranks(4)
    import shutil

    shutil.rmtree(archive)
    (space,) = (path for path in (shop.folder / "old").iterdir() if path.is_dir())
    shutil.rmtree(space / "tp3of4-pp0of1-cp0of1-w0")
    export_archive(shop.folder / "old", archive)
    report = import_archive(archive, shop.folder / "new", conversion=Conversion.parse(tp=2))
    assert report.imported == len(keys)
    assert report.refused == {"rank": len(keys)}
    assert "tp3of4" in report.details[0]["reason"]
    found = shop.read(shop.folder / "new", keys, geometry(4), tp=(0, 2))
    assert found == pages_of(values, keys, "page_first", TOKENS, share(0, 2))


def test_a_page_that_one_rank_lacks_is_refused(shop):
    values, keys = model(4 * TOKENS), keys_of("p", 4)
    for rank in range(2):
        some = keys if rank == 0 else keys[:3]
        data = pages_of(values, keys, "page_first", TOKENS, share(rank, 2))
        shop.fill("old", geometry(4), keys=some, data=data, tp=(rank, 2))
    export_archive(shop.folder / "old", shop.folder / "archive")
    report = import_archive(shop.folder / "archive", shop.folder / "new", conversion=Conversion.parse(tp=1))
    assert (report.imported, report.refused) == (3, {"rank": 1})
    assert report.details[0]["key"] == keys[3].hex()


def test_copies_of_heads(shop):
    """Two KV heads on four ranks: pairs of ranks hold the same head, as they do in engines."""
    values, keys = model(2 * TOKENS, heads=2), keys_of("p", 2)
    for rank in range(4):
        data = pages_of(values, keys, "page_first", TOKENS, range(rank // 2, rank // 2 + 1))
        shop.fill("old", geometry(1), keys=keys, data=data, tp=(rank, 4))
    export_archive(shop.folder / "old", shop.folder / "archive")
    conversion = Conversion.parse(tp=1, kv_heads=2)
    report = import_archive(shop.folder / "archive", shop.folder / "new", conversion=conversion)
    assert (report.imported, report.refused) == (2, {})
    found = shop.read(shop.folder / "new", keys, geometry(2))
    assert found == pages_of(values, keys, "page_first", TOKENS, range(2))
    wrong = import_archive(
        shop.folder / "archive", shop.folder / "other", conversion=Conversion.parse(tp=2, kv_heads=8)
    )
    assert (wrong.imported, wrong.refused) == (0, {"heads": 8})
    assert "--kv-heads" in wrong.details[0]["reason"]


@pytest.mark.parametrize(("old", "new"), [(8, 4), (8, 2), (4, 8), (2, 8)])
@pytest.mark.parametrize("tenant", [None, "salt"])
def test_page_sizes(shop, tmp_path, old, new, tenant):
    tokens = [*range(100, 100 + 26)]
    values = model(26)
    keys = page_keys(tokens, old, salt=tenant)
    data = pages_of(values, keys, "page_first", old, range(HEADS))
    shop.fill("old", geometry(HEADS, old), keys=keys, data=data, tenant=tenant)
    selection = Selection(prompts=(np.array(tokens, np.uint32),), tenants=(tenant,) if tenant else ())
    assert export_archive(shop.folder / "old", tmp_path / "archive", selection=selection).pages == len(keys)
    tenants = (tenant,) if tenant else ()
    conversion = Conversion.parse(page_tokens=new)
    report = import_archive(tmp_path / "archive", tmp_path / "new", conversion=conversion, tenants=tenants)
    wanted = page_keys(tokens[: len(keys) * old], new, salt=tenant)
    assert report.imported == len(wanted)
    left = len(keys) * old % new // old
    assert report.refused == ({"page_tokens": left} if left else {})
    found = shop.read(tmp_path / "new", wanted, geometry(HEADS, new), tenant=tenant)
    assert found == pages_of(values, wanted, "page_first", new, range(HEADS))


def test_page_sizes_of_chains_that_fork(shop, tmp_path):
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9], [1, 2, 5, 5]]
    data, parents, order = {}, [], []
    for at, prompt in enumerate(prompts):
        values, keys = model(len(prompt), seed=at), page_keys(prompt, 2)
        for i, key in enumerate(keys):
            if key not in data:
                order.append(key)
                parents.append(keys[i - 1] if i else None)
                data[key] = page_of(values, "page_first", 2 * i, 2, range(HEADS))
    shop.fill("old", geometry(HEADS, 2), keys=order, parents=parents, data=data)
    selection = Selection(prompts=tuple(np.array(prompt, np.uint32) for prompt in prompts))
    export_archive(shop.folder / "old", tmp_path / "archive", selection=selection)
    report = import_archive(
        tmp_path / "archive", tmp_path / "new", conversion=Conversion.parse(page_tokens=4)
    )
    wanted = {key for prompt in prompts for key in page_keys(prompt, 4)}
    assert report.imported == len(wanted) == 4
    assert report.refused == {}
    assert shop.read(tmp_path / "new", [*wanted], geometry(HEADS, 4)).keys() == wanted


def test_page_sizes_need_token_ids_and_whole_chains(shop, tmp_path):
    tokens = [*range(24)]
    keys = page_keys(tokens, TOKENS)
    root, _ = shop.fill("old", geometry(2), keys=keys)
    export_archive(root, tmp_path / "plain")
    conversion = Conversion.parse(page_tokens=4)
    report = import_archive(tmp_path / "plain", tmp_path / "new", conversion=conversion)
    assert (report.imported, report.refused) == (0, {"page_tokens": 3})
    assert "token ids" in report.details[0]["reason"]
    prompt = np.array(tokens, np.uint32)
    export_archive(root, tmp_path / "gap", selection=Selection(prompts=(prompt,), keys=frozenset(keys[1:])))
    report = import_archive(tmp_path / "gap", tmp_path / "new", conversion=conversion)
    assert (report.imported, report.refused) == (0, {"page_tokens": 2})
    assert "before it" in report.details[0]["reason"]
    odd = import_archive(tmp_path / "gap", tmp_path / "new", conversion=Conversion.parse(page_tokens=3))
    assert odd.refused == {"page_tokens": 2}


def test_rounding_must_be_allowed(shop, tmp_path):
    root, keys = shop.fill("old", geometry(2, dtype="float32"), keys=keys_of("p", 3))
    export_archive(root, tmp_path / "archive")
    report = import_archive(
        tmp_path / "archive", tmp_path / "new", conversion=Conversion.parse(dtype="bfloat16")
    )
    assert (report.imported, report.refused) == (0, {"dtype": 3})
    assert not (tmp_path / "new").exists()
    conversion = Conversion.parse(dtype="bfloat16", allow_lossy=True)
    assert import_archive(tmp_path / "archive", tmp_path / "new", conversion=conversion).imported == 3
    assert len(shop.read(tmp_path / "new", keys, geometry(2))) == 3


def test_side_pools_keep_their_bytes_and_share_the_new_namespace(shop, tmp_path):
    kv = geometry(4)
    index = KVGeometry.indexer(num_layers=2, bytes_per_token=12, page_tokens=TOKENS)
    pools = {"kv": kv, "indexer": index}
    keys = keys_of("p", 3)
    for rank in range(2):
        shop.fill("old", kv, keys=keys, pools=pools, tp=(rank, 2))
    shop.fill("old", index, keys=keys, pools=pools, tp=(0, 2))
    export_archive(shop.folder / "old", tmp_path / "archive")
    report = import_archive(tmp_path / "archive", tmp_path / "new", conversion=Conversion.parse(tp=1))
    assert (report.imported, report.refused) == (6, {})
    joined = {"kv": replace(geometry(8)), "indexer": index}
    old = shop.read(shop.folder / "old", keys, index, pools=pools, tp=(0, 2))
    assert shop.read(tmp_path / "new", keys, index, pools=joined) == old
    assert len(shop.read(tmp_path / "new", keys, geometry(8), pools=joined)) == 3
