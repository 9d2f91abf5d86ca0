"""What an export takes, and what it leaves alone."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

from hicache_tier.keys import page_keys
from hicache_tier.testing.array_pool import ArrayPool, keys_of, page_bytes, write_page
from hicache_tier.testing.store_rig import tree
from hicache_tier_storage import open_store
from hicache_tier_storage.archive import Selection, export_archive, open_archive
from hicache_tier_storage.record import keys_of as keys_of_rows


def test_keys_and_namespaces(shop, tmp_path):
    root, keys = shop.fill(model="a")
    shop.fill(model="b")
    (first, second) = sorted(path.name for path in root.iterdir() if path.is_dir())
    some = frozenset(keys[3:7])
    report = export_archive(root, tmp_path / "keys", selection=Selection(keys=some))
    assert report.pages == 8
    assert report.left_out == {"not_selected": 32}
    assert shop.keys_in(tmp_path / "keys") == some
    export_archive(root, tmp_path / "space", selection=Selection(namespaces=(first[:9],)))
    assert {name.partition("/")[0] for name, _ in shop.archived(tmp_path / "space")} == {first}
    assert second not in {path.name for path in (tmp_path / "space").iterdir()}


def test_prompts(shop, tmp_path):
    tokens = [*range(50)]
    keys = page_keys(tokens, 8, adapter="lora")
    root, _ = shop.fill(keys=[*keys, *keys_of("other", 5)], adapter="lora")
    prompt = np.array(tokens[:33], np.uint32)
    export_archive(root, tmp_path / "archive", selection=Selection(prompts=(prompt,)))
    assert shop.keys_in(tmp_path / "archive") == {*keys[:4]}
    with open_archive(tmp_path / "archive") as archive:
        (part,) = archive.parts
        rows = keys_of_rows(part.rows(np.arange(4)))
        ids = part.token_ids(np.arange(4))
        assert {key: ids[at].tolist() for at, key in enumerate(rows)} == {
            key: tokens[at * 8 : at * 8 + 8] for at, key in enumerate(keys[:4])
        }


@pytest.mark.parametrize("first", ["used", "newest"])
def test_whole_prefixes_up_to_a_size(shop, tmp_path, monkeypatch, first):
    """Three chains made one after another; the oldest is used last."""
    chains = [keys_of(f"chain{at}", 5) for at in range(3)]
    now = time.time()
    for at, chain in enumerate(chains):
        monkeypatch.setattr(time, "time_ns", lambda at=at: int((now - 1000 + 100 * at) * 1e9))
        monkeypatch.setattr(time, "time", lambda at=at: now - 1000 + 100 * at)
        root, _ = shop.fill(keys=chain)
    monkeypatch.setattr(time, "time", lambda: now)
    with open_store(root, shop.geometry, "page_first", model="m", capacity_bytes=4 << 20) as store:
        store.touch(chains[0][:3])
    monkeypatch.undo()
    selection = Selection(max_nbytes=8 * shop.geometry.page_nbytes, first=first)
    report = export_archive(root, tmp_path / "archive", selection=selection)
    assert (report.pages, report.left_out) == (8, {"over_size": 7})
    best, next_best = (chains[0][:3], chains[2]) if first == "used" else (chains[2], chains[1][:3])
    assert shop.keys_in(tmp_path / "archive") == {*best, *next_best}


def test_ranks_of_a_namespace_keep_the_same_pages(shop, tmp_path):
    keys = keys_of("p", 8)
    for rank in range(2):
        root, _ = shop.fill(keys=keys, tp=(rank, 2))
    selection = Selection(max_nbytes=7 * shop.geometry.page_nbytes)
    export_archive(root, tmp_path / "archive", selection=selection)
    found = shop.archived(tmp_path / "archive")
    by_rank = {name: {key for other, key in found if other == name} for name, _ in found}
    assert [*by_rank.values()] == [{*keys[:3]}] * 2


def test_dry_run_touches_nothing(shop, tmp_path):
    root, _ = shop.fill()
    before = tree(tmp_path)
    report = export_archive(root, tmp_path / "archive", dry_run=True)
    assert (report.pages, report.dry_run) == (20, True)
    assert tree(tmp_path) == before


def test_damaged_pages_stay_out(shop, tmp_path):
    root, _ = shop.fill()
    (slab,) = root.glob("*/*/kv/pages/c.0.*")
    with slab.open("r+b") as file:
        file.seek(5)
        file.write(b"\xff\xff\xff")
    report = export_archive(root, tmp_path / "archive")
    assert (report.pages, report.left_out) == (19, {"damaged": 1})
    assert len(shop.archived(tmp_path / "archive")) == 19


def test_pages_of_several_writers_are_kept_once(shop, tmp_path):
    root, keys = shop.fill()
    with open_store(root, shop.geometry, "page_first", model="m", capacity_bytes=4 << 20, threads=1):
        shop.fill(keys=keys[:4])  # another writer's partition; pages that the first has are not stored again
        _, more = shop.fill(keys=keys_of("more", 3))
    report = export_archive(root, tmp_path / "archive")
    assert shop.keys_in(tmp_path / "archive") == {*keys, *more}
    assert len(report.parts) == 1


def test_a_store_under_load(shop, tmp_path, small_shards):
    """Pages come and go while exports run; what is in an archive is what was stored under its key."""
    nbytes = shop.geometry.page_nbytes
    root = tmp_path / "live"
    options = {"model": "m", "capacity_bytes": 100 * 4096 + (64 << 10), "io_mode": "buffered", "threads": 1}
    over, put = threading.Event(), []

    def write(store):
        host = ArrayPool(shop.geometry, "page_first", 8)
        while not over.wait(0.01):
            keys = keys_of("live", 8, len(put))
            for i, key in enumerate(keys):
                write_page(host, i, page_bytes(key, nbytes))
            assert all(store.put(keys, host, range(8)))
            put.extend(keys)

    left_out = {}
    with open_store(root, shop.geometry, "page_first", **options) as store:
        writer = threading.Thread(target=write, args=(store,))
        writer.start()
        try:
            while len(put) < 200:
                time.sleep(0.005)
            for at in range(6):
                left_out |= export_and_check(shop, root, tmp_path / f"archive{at}")
        finally:
            over.set()
            writer.join(20)
        assert store.stats()["evictions"] > 0
    assert set(left_out) <= {"changed", "copies"}


def export_and_check(shop, root, target):
    report = export_archive(root, target, threads=2)
    assert report.live
    found = shop.archived(target)
    assert len(found) == report.pages > 0
    assert all(data == page_bytes(key, shop.geometry.page_nbytes) for (_, key), data in found.items())
    shards = list(target.rglob("pages/c.*"))
    assert len(shards) == -(-report.pages // 4)  # compact: only the last shard has room
    return report.left_out


def test_the_store_is_not_written_to(shop, tmp_path):
    root, _ = shop.fill()
    before = tree(root)
    export_archive(root, tmp_path / "archive")
    assert tree(root) == before


def test_the_manifest_is_json_that_people_read(shop, tmp_path):
    root, _ = shop.fill()
    export_archive(root, tmp_path / "archive")
    manifest = json.loads((tmp_path / "archive" / "zarr.json").read_text())["attributes"]["hicache_tier"]
    assert (manifest["format"], manifest["version"]) == ("hct-archive", 1)
    (space,) = manifest["namespaces"].values()
    assert space["model"] == "m"
    assert [part["pages"] for part in manifest["parts"]] == [20]
