"""Archives straight into host memory: pools, tiers, and `import --to-host`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hicache_tier import Tier, open_store
from hicache_tier.device_pool import DevicePool
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool
from hicache_tier.keys import page_keys
from hicache_tier.testing.array_pool import keys_of, page_bytes, read_page
from hicache_tier.testing.memory_store import MemoryStore
from hicache_tier_storage.archive import (
    ArchiveError,
    Conversion,
    Selection,
    export_archive,
    import_archive,
    load_archive,
    open_archive,
)


@pytest.fixture
def archive(shop, tmp_path):
    root, keys = shop.fill()
    export_archive(root, tmp_path / "archive")
    return tmp_path / "archive", keys


@pytest.fixture
def pool(shop):
    made = []

    def make(pages, layout="page_first", geometry=shop.geometry):
        made.append(HostPool(geometry, layout, pages, pinned=False))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def store(shop, tmp_path):
    with open_store(
        tmp_path / "fresh", shop.geometry, "layer_first", model="m", capacity_bytes="4 MiB", threads=1
    ) as store:
        yield store


@pytest.mark.parametrize("pages", [32, 7])
def test_a_pool_gets_whole_prefixes(shop, archive, pool, pages):
    path, keys = archive
    host = pool(pages)
    found = load_archive(path, host)
    assert found.keys == keys[:pages]
    assert found.parents == [None, *keys[: pages - 1]][: len(keys)]
    assert (found.refused, host.free_pages) == ([], pages - len(found.keys))
    for key, page in zip(found.keys, found.pages, strict=True):
        assert read_page(host, page) == page_bytes(key, shop.geometry.page_nbytes)


def test_a_pool_of_another_layout(shop, archive, pool, tmp_path):
    path, keys = archive
    host = pool(32, "page_head")
    assert load_archive(path, host, max_pages=5).keys == keys[:5]
    import_archive(path, tmp_path / "new", conversion=Conversion.parse(layout="page_head"))
    wanted = shop.read(tmp_path / "new", keys, layout="page_head")
    found = load_archive(path, host)
    assert found.keys == keys
    assert {key: read_page(host, page) for key, page in zip(found.keys, found.pages, strict=True)} == wanted


def test_a_pool_of_another_rank(shop, pool, tmp_path):
    keys = keys_of("p", 4)
    for rank in range(2):
        shop.fill("old", keys=keys, tp=(rank, 2))
    export_archive(tmp_path / "old", tmp_path / "archive")
    host = pool(4)
    with pytest.raises(InvalidArgumentError, match="tp1of2"):
        load_archive(tmp_path / "archive", host)
    assert len(load_archive(tmp_path / "archive", host, tp=(1, 2)).keys) == 4
    half = KVGeometry.mha(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=8)
    assert len(load_archive(tmp_path / "archive", pool(4, geometry=half), tp=(3, 4)).keys) == 4
    with pytest.raises(ArchiveError, match="no pages for this pool"):
        load_archive(tmp_path / "archive", pool(4, geometry=half))


def test_damaged_pages_are_not_loaded(archive, pool):
    path, keys = archive
    (shard,) = path.rglob("pages/c.0.*")
    with shard.open("r+b") as file:
        file.write(b"\x00\x01\x02\x03")
    host = pool(32)
    found = load_archive(path, host)
    assert found.refused == [(keys[0], "checksum")]
    assert found.keys == keys[1:]
    assert host.free_pages == 32 - 19


def test_a_tier_in_two_lines(shop, archive, pool, store):
    path, keys = archive
    host = pool(32, "layer_first")
    with Tier(host, store) as tier:
        with open_archive(path) as archive_:
            assert tier.warm(archive_) == 20
        assert tier.match(keys).host_pages == 20
        device = DevicePool.empty(shop.geometry, 20)
        assert tier.load(keys, device, range(20)) == 20
        assert tier.warm(path) == 0
        assert tier.flush() == 0
        assert tier.stats()["warming"] == {"loaded_pages": 20}
    assert store.match_prefix(keys) == 20
    again = HostPool(shop.geometry, "layer_first", 20, pinned=False)
    assert all(store.get(keys, again, range(20)))
    for page in range(20):
        old = {name: view[0] for name, view in again.page_views(page).items()}
        rows = slice(8 * page, 8 * page + 8)
        assert torch.equal(device.layers[0][0][rows].view(torch.int16), old["k"].view(torch.int16))
    again.close()


def test_a_full_tier_keeps_what_it_has(shop, archive, pool, store):
    path, keys = archive
    host = pool(8, "layer_first")
    with Tier(host, store) as tier:
        device = DevicePool.empty(shop.geometry, 4)
        mine = keys_of("mine", 4)
        assert tier.insert(mine, device, range(4)) == 4
        assert tier.warm(path) == 4
        assert tier.match(mine).host_pages == 4
        assert tier.match(keys[:4]).host_pages == 4


def test_what_a_tier_refuses(shop, archive, pool, store, tmp_path):
    path, _ = archive
    with Tier(pool(8, "layer_first"), store) as tier:
        root, _ = shop.fill("other", model="another")
        export_archive(root, tmp_path / "another")
        with pytest.raises(ArchiveError, match="no pages for this pool"):
            tier.warm(tmp_path / "another")
        with pytest.raises(ArchiveError):
            tier.warm(tmp_path / "nothing")
        assert tier.stats()["host"]["free_pages"] == 8
    with Tier(pool(8), MemoryStore(shop.geometry, "page_first")) as tier, pytest.raises(InvalidArgumentError):
        tier.warm(path)


def test_damaged_pages_stay_out_of_a_tier(shop, archive, pool, store):
    path, keys = archive
    (shard,) = path.rglob("pages/c.0.*")
    with shard.open("r+b") as file:
        file.seek(5 * shop.geometry.page_nbytes)
        file.write(b"\x00\x01\x02\x03")
    with Tier(pool(32, "layer_first"), store) as tier:
        assert tier.warm(path) == 19
        assert tier.match(keys).host_pages == 5
        assert tier.stats()["warming"]["refused_pages"] == {"checksum": 1}


def test_import_reads_pages_back(archive, tmp_path):
    path, _ = archive
    report = import_archive(path, tmp_path / "new", to_host=True)
    assert (report.imported, report.host_pages) == (20, 20)
    again = import_archive(path, tmp_path / "new", to_host=True)
    assert (again.already_stored, again.host_pages, again.host_nbytes) == (20, 20, 20 * 2048)


def tokens_of(shop, tmp_path, pages):
    """Archive of one prompt with its token ids; return it and the ids."""
    ids = np.arange(pages * 8, dtype=np.uint32)
    root, _ = shop.fill(keys=page_keys(ids, 8))
    export_archive(root, tmp_path / "archive", selection=Selection(prompts=(ids,)))
    return tmp_path / "archive", ids


@pytest.mark.parametrize("page_tokens", [2, 4, 16])
def test_pages_of_another_size_are_whole_prefixes_too(shop, tmp_path, pool, page_tokens):
    archive, ids = tokens_of(shop, tmp_path, 16)
    keys = page_keys(ids, page_tokens)
    geometry = replace(shop.geometry, page_tokens=page_tokens, rows=page_tokens)
    found = load_archive(archive, pool(len(keys) // 2, geometry=geometry))
    assert found.keys == keys[: len(keys) // 2]
    assert found.parents == [None, *keys[: len(keys) // 2 - 1]]


def test_an_import_without_room_brings_whole_prefixes_of_another_page_size(shop, tmp_path):
    archive, ids = tokens_of(shop, tmp_path, 64)
    keys = page_keys(ids, 4)
    conversion = Conversion.parse(page_tokens=4)
    report = import_archive(archive, tmp_path / "new", conversion=conversion, capacity_bytes=40 * 4096 + 8192)
    assert 0 < report.imported < len(keys)
    geometry = replace(shop.geometry, page_tokens=4, rows=4)
    assert [*shop.read(tmp_path / "new", keys, geometry)] == keys[: report.imported]
