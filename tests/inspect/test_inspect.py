"""`inspect_root`: what is stored, by whom, how old, in which chains; and nothing is touched."""

from __future__ import annotations

import json
import os
import time

import pytest

from hicache_tier.errors import NotAStoreError, StoreError
from hicache_tier.testing.array_pool import key_of, keys_of
from hicache_tier_storage.inspection import inspect_root


def only(told):
    ((partition,),) = (space["partitions"] for space in told["namespaces"])
    return partition


def test_closed_store(stored, tools):
    before = time.time()
    told = inspect_root(stored.root)
    json.dumps(told)
    assert told["foreign"] == []
    assert told["namespaces"][0]["identity"]["model"] == "m"
    assert told["namespaces"][0]["namespace"] == stored.partition.parent.parent.name
    partition = only(told)
    assert partition["rank"] == "tp0of1-pp0of1-cp0of1"
    assert (partition["writer"], partition["pool"]) == (0, "kv")
    assert partition["pages"] == tools.count
    assert partition["bytes"] == tools.count * tools.geometry.page_nbytes
    assert partition["capacity_bytes"] == tools.capacity
    assert partition["axes"] == ["kv", "token", "layer", "head", "dim"]
    assert (partition["slabs"], partition["slots_per_slab"]) == (3, tools.slots)
    files = [path for kind in ("pages", "slots") for path in (stored.partition / kind).glob("c.*")]
    assert partition["allocated_bytes"] == sum(path.stat().st_size for path in files)
    assert (partition["writer_live"], partition["clean"], partition["epoch"]) == (False, True, 1)
    assert partition["pinned"] == partition["suspect_pages"] == partition["unfinished"] == 0
    assert before - 60 < partition["oldest_created"] <= partition["newest_created"] < before
    assert before - 60 < partition["oldest_accessed"] <= partition["newest_accessed"] <= before
    assert partition["chains"] == {"roots": 1, "leaves": 1, "longest": tools.count, "orphans": 0}
    assert partition["damage"] == []


def test_nothing_is_written(stored, tools):
    before = tools.snapshot(stored.root)
    inspect_root(stored.root)
    assert tools.snapshot(stored.root) == before


def test_read_only_folder(stored):
    folders = [path for path in [stored.root, *stored.root.rglob("*")] if path.is_dir()]
    for path in [*stored.root.rglob("*"), stored.root]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        assert only(inspect_root(stored.root))["pages"] == 20
    finally:
        for folder in folders:
            folder.chmod(0o700)


def test_live_writer_is_seen_and_keeps_its_partition(tmp_path, tools):
    root = tmp_path / "store"
    with tools.open_store(root) as store:
        tools.put_chain(store, keys_of("a", 3))
        partition = only(inspect_root(root))
        assert (partition["writer_live"], partition["clean"], partition["pages"]) == (True, False, 3)
        tools.put_chain(store, keys_of("b", 3))
        assert only(inspect_root(root))["pages"] == 6


def test_a_writer_that_starts_meanwhile_still_gets_number_zero(stored, tools):
    """The probe must never make a starting writer step aside to another number."""
    import threading

    stop = threading.Event()

    def look():
        while not stop.is_set():
            inspect_root(stored.root)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(15):
            with tools.open_store(stored.root) as store:
                assert store.stats()["partition"].endswith("-w0/kv")
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_held_root_lock_is_waited_for_in_bounds(stored, monkeypatch):
    import fcntl

    monkeypatch.setattr("hicache_tier_storage.liveness._PATIENCE_S", 0.05)
    fd = os.open(stored.root / ".hct.lock", os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert only(inspect_root(stored.root))["writer_live"] is None
    finally:
        os.close(fd)
    assert only(inspect_root(stored.root))["writer_live"] is False


def test_while_another_process_puts(tmp_path, child):
    root = tmp_path / "store"
    process = child(root)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        partition = only(inspect_root(root))
        assert partition["damage"] == []
        assert partition["writer_live"]
    process.kill()
    process.wait()
    partition = only(inspect_root(root))
    assert (partition["writer_live"], partition["clean"], partition["damage"]) == (False, False, [])
    assert partition["suspect_pages"] == 0, "a killed process makes nothing suspect"
    assert partition["pages"] >= 32


def test_pins_short_keys_and_holes(tmp_path, tools):
    root = tmp_path / "store"
    chain = keys_of("chain", 6)
    with tools.open_store(root) as store:
        tools.put_chain(store, chain, pin=True)
        tools.put_chain(store, [b"a", b"ab"])
        store.delete(chain[2:3])
    partition = only(inspect_root(root))
    assert (partition["pages"], partition["pinned"]) == (7, 5)
    assert partition["chains"] == {"roots": 2, "leaves": 3, "longest": 2, "orphans": 3}


def test_chains_run_over_the_writers_of_a_rank(tmp_path, tools):
    root = tmp_path / "store"
    chain = keys_of("chain", 8)
    with tools.open_store(root) as one, tools.open_store(root) as two:
        tools.put_chain(one, chain[:4])
        tools.until(lambda: two.match_prefix(chain) == 4)
        assert all(tools.put_chain(two, chain))
    first, second = inspect_root(root)["namespaces"][0]["partitions"]
    assert (first["pages"], second["pages"]) == (4, 4)
    assert first["chains"] == {"roots": 1, "leaves": 0, "longest": 4, "orphans": 0}
    assert second["chains"] == {"roots": 0, "leaves": 1, "longest": 8, "orphans": 0}


def test_namespaces_are_apart(tmp_path, tools):
    root = tmp_path / "store"
    for model in ("a", "b"):
        with tools.open_store(root, model=model) as store:
            tools.put_chain(store, [key_of(1)])
    told = inspect_root(root)
    assert sorted(space["identity"]["model"] for space in told["namespaces"]) == ["a", "b"]


def test_suspect_pages_are_those_before_an_unclean_end(stored, tools):
    with tools.open_store(stored.root) as store:
        tools.put_chain(store, keys_of("new", 4))
        partition = only(inspect_root(stored.root))
        assert partition["suspect_pages"] == 0
    state = stored.partition / "state" / "c.0"
    from hicache_tier_storage.state import StateBlock

    block = StateBlock.unpack(state.read_bytes(), state)
    from dataclasses import replace

    state.write_bytes(replace(block, clean=False, boot_id=bytes(16)).pack())
    assert only(inspect_root(stored.root))["suspect_pages"] == 24
    with tools.open_store(stored.root) as store:
        tools.put_chain(store, keys_of("newer", 4))
        assert only(inspect_root(stored.root))["suspect_pages"] == 24


def test_foreign_entries_are_listed(stored, tools):
    pages = stored.partition / "pages"
    (stored.root / "notes.txt").write_text("mine")
    (stored.root / "folder" / "deep").mkdir(parents=True)
    (stored.partition.parent / "odd name").mkdir()
    (pages / "c.0.backup").write_text("mine")
    (pages / "c.9.0.0.0.0.0.tmp").write_text("left by a killed writer: the store's own")
    (stored.root / ("0" * 32)).symlink_to(stored.partition.parent.parent)
    (stored.root / ("1" * 32)).mkdir()
    relative = stored.partition.relative_to(stored.root)
    told = inspect_root(stored.root)
    assert told["foreign"] == sorted(
        [
            "0" * 32,
            "1" * 32,
            "folder",
            "notes.txt",
            f"{relative.parent}/odd name",
            f"{relative}/pages/c.0.backup",
        ]
    )
    assert only(told)["pages"] == tools.count


@pytest.mark.parametrize(
    ("spoil", "what", "pages"),
    [
        (lambda s: os.truncate(s.slab(1), 4096), "4096 bytes instead of", 12),
        (lambda s: s.slab(1).unlink(), "is missing", 12),
        (lambda s: s.table(1).unlink(), "has no slot table", 12),
        (lambda s: os.truncate(s.table(1), 300), "300 bytes instead of 1024", 12),
        (lambda s: (s.partition / "state" / "c.0").unlink(), "state/c.0 is missing", 20),
        (lambda s: (s.partition / "state" / "c.0").write_bytes(b"x" * 4096), "not a state block", 20),
        (lambda s: (s.partition / "pages" / "zarr.json").unlink(), "pages/zarr.json is missing", 20),
        (lambda s: (s.partition / "slots" / "zarr.json").write_text("{"), "slots/zarr.json is not JSON", 20),
        (lambda s: (s.partition / "zarr.json").unlink(), "zarr.json is missing", 0),
        (lambda s: (s.partition / "zarr.json").write_text("{}"), "not a store's group", 0),
    ],
)
def test_damaged_files_are_named_and_the_rest_is_told(stored, spoil, what, pages):
    spoil(stored)
    partition = only(inspect_root(stored.root))
    assert any(what in line for line in partition["damage"]), partition["damage"]
    assert partition["pages"] == pages


def test_no_store(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(NotAStoreError):
            inspect_root(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotAStoreError):
        inspect_root(tmp_path / "file")
    with pytest.raises(StoreError):
        inspect_root(tmp_path)
