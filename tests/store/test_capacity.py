"""The cap, the disk, and which pages go first."""

from __future__ import annotations

import errno
import os
import subprocess
import time

import pytest

from hicache_tier.errors import StoreError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_process import StoreProcess
from hicache_tier.testing.store_rig import (
    CAPACITY_NBYTES,
    PAGE_NBYTES,
    StoreRig,
    paths_of,
    slab_of,
    writer_of,
)
from hicache_tier_storage import posix, vectors
from hicache_tier_storage.asked_capacity import parse_capacity

STATE_NBYTES = 300 << 10  # journal, state block and documents of a partition


def on_disk(root):
    """Bytes that slabs and tables really take, and all files together."""
    total = slabs = 0
    for path in root.rglob("*"):
        try:
            stat = path.lstat()
        except FileNotFoundError:
            continue
        if path.is_file():
            nbytes = max(stat.st_size, stat.st_blocks * 512)
            total += nbytes
            slabs += nbytes if path.parent.name in {"pages", "slots"} and path.name != "zarr.json" else 0
    return slabs, total


def wait_until(condition, timeout_s=6.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


def test_more_pages_than_room_in_one_batch_stores_the_head_of_the_chain(shop, keys):
    store = shop.open(capacity_bytes=640 << 10)
    reasons = shop.chain(store, keys[:200])
    stored = reasons.count("stored")
    assert 30 < stored < 200
    assert reasons == ["stored"] * stored + ["capacity"] * (200 - stored)
    assert store.match_prefix(keys[:200]) == stored
    assert shop.get(store, keys[:stored]) == ["loaded"] * stored
    assert shop.chain(store, keys[:200]) == ["already_stored"] * stored + ["capacity"] * (200 - stored)
    assert shop.get(store, keys[:stored]) == ["loaded"] * stored


def test_a_batch_does_not_evict_its_own_head(shop, keys):
    store = shop.open(capacity_bytes=640 << 10)
    room = shop.put(store, keys[:200]).count("stored")
    store.clear()
    other = keys_of("other", room - 10)
    assert shop.put(store, keys[:10]) == ["stored"] * 10
    assert shop.put(store, other) == ["stored"] * len(other)
    # The store is full, and the ten pages of this chain are the oldest ones.
    reasons = shop.put(store, keys[: room + 5])
    good = [reason.endswith("stored") for reason in reasons]
    assert store.match_prefix(keys) == good.index(False) == sum(good) == room


def test_a_page_is_never_evicted_for_the_one_that_continues_it(shop, keys):
    store = shop.open(capacity_bytes=640 << 10)
    room = shop.put(store, keys[:200]).count("stored")
    store.clear()
    shop.chain(store, keys[:1])
    shop.put(store, keys_of("other", room - 1))
    assert shop.put(store, keys[1:2], parents=keys[:1]) == ["stored"]
    assert store.match_prefix(keys) == 2


def test_leaves_go_before_heads_across_batches(shop, keys):
    store = shop.open(capacity_bytes=640 << 10)
    room = shop.put(store, keys[:200]).count("stored")
    store.clear()
    parents = [None, *keys]
    for first in range(0, room, 8):  # a long chain, a few pages at a time: heads are the oldest
        part = slice(first, min(first + 8, room))
        assert set(shop.put(store, keys[part], parents=parents[part])) == {"stored"}
    for turn in range(0, room - 8, 8):
        shop.put(store, keys_of(f"other{turn}", 8))
        left = store.match_prefix(keys)
        assert left == room - 8 - turn
        assert sum(store.contains(keys)) == left, "a hole in the chain"


def test_least_recently_used_goes_first(shop, keys):
    store = shop.open(capacity_bytes=640 << 10)
    room = shop.put(store, keys[:200]).count("stored")
    store.clear()
    shop.put(store, keys[:room])
    shop.get(store, keys[:20])
    shop.put(store, keys_of("other", room - 20))
    assert store.contains(keys[:room]) == [True] * 20 + [False] * (room - 20)
    assert store.stats()["evictions"] == room - 20


def test_pinned_pages_stay_over_restarts_until_they_are_unpinned(shop, keys):
    store = shop.open(capacity_bytes=640 << 10)
    room = shop.put(store, keys[:200]).count("stored")
    store.clear()
    shop.put(store, keys[:10], pin=True)
    shop.put(store, keys[10:20])
    store.pin(keys[10:20])
    assert set(shop.put(store, keys_of("a", room - 20))) == {"stored"}
    assert shop.put(store, keys_of("b", room)).count("stored") == room - 20
    store.close()
    store = shop.open(capacity_bytes=640 << 10)
    shop.put(store, keys_of("c", room))
    assert all(store.contains(keys[:20]))
    assert [s.reason for s in store.unpin([*keys[:20], b"none"])] == ["unpinned"] * 20 + ["absent"]
    shop.put(store, keys_of("d", room))
    assert not any(store.contains(keys[:20]))


def test_when_all_is_pinned_a_put_is_refused_and_reads_go_on(shop, keys):
    store = shop.open(capacity_bytes=640 << 10)
    stored = shop.put(store, keys[:200], pin=True).count("stored")
    assert shop.put(store, [b"one more"]) == ["capacity"]
    assert shop.get(store, keys[:stored]) == ["loaded"] * stored
    assert store.stats()["put"]["capacity"] == 200 - stored + 1


@pytest.mark.parametrize("writers", [2, 3])
def test_the_cap_holds_for_all_processes_together(tmp_path, writers):
    root = tmp_path / "root"
    workers = [StoreProcess(root, capacity_bytes=CAPACITY_NBYTES) for _ in range(writers)]
    try:
        for turn in range(4):
            for number, worker in enumerate(workers):
                worker.tell("put", salt=f"{number}", count=40, first=40 * turn)
            for worker in workers:
                assert len(worker.answer()) == 40
            slabs, total = on_disk(root)
            assert slabs <= CAPACITY_NBYTES
            assert total <= CAPACITY_NBYTES + (writers + 1) * STATE_NBYTES
            time.sleep(0.2)
        shares = [worker.call("stats")["allocated_bytes"] for worker in workers]
        assert min(shares) > 0
    finally:
        for worker in workers:
            worker.__exit__()


def test_a_late_writer_gets_its_fair_share(shop, keys):
    first = shop.open()
    shop.put(first, keys[:250])
    full = writer_of(first).capacity // 16
    assert len(writer_of(first).slabs) >= full - 1
    late = shop.open()
    assert shop.put(late, keys_of("late", 4)) == ["capacity"] * 4
    started = time.monotonic()
    wait_until(lambda: shop.put(late, keys_of("late", 4))[0].endswith("stored"))
    print(f" [room after {time.monotonic() - started:.1f} s]", end="")
    assert time.monotonic() - started < 4
    shop.get(first, keys[:250])
    assert on_disk(shop.root)[0] <= CAPACITY_NBYTES


def test_more_ranks_than_the_capacity_has_slabs_for_are_told_apart_from_a_full_store(shop, keys, caplog):
    stores = [shop.open(tp=(rank, 16)) for rank in range(16)]
    for store in stores[:15]:
        assert shop.put(store, keys[:4]) == ["stored"] * 4
    for _ in range(2):
        assert shop.put(stores[15], keys[:4]) == ["capacity: 15 slabs for 16 writers"] * 4
    told = stores[15].stats()
    assert told["put"] == {"capacity": 8}
    (line,) = told["damage"]
    assert f"capacity_bytes={CAPACITY_NBYTES} is 15 slabs" in line
    assert "16 writers (ranks and pools)" in line
    assert sum("16 writers" in record.message for record in caplog.records) == 1
    assert not any(store.stats()["damage"] for store in stores[:15])
    shop.close()
    least = int(line.split("at least ")[1].split()[0])
    for store in [shop.open(tp=(rank, 16), capacity_bytes=least) for rank in range(16)]:
        assert shop.put(store, keys[20:21]) == ["stored"]


def test_slabs_of_writers_that_are_gone_are_taken_coldest_first(shop, keys):
    for model in ("cold", "warm"):
        store = shop.open(model=model)
        shop.put(store, keys[:100])
        store.close()
        time.sleep(1.1)  # access times are whole seconds
    store = shop.open(model="new")
    assert set(shop.put(store, keys[:60])) == {"stored"}
    store.close()
    warm, cold = (shop.open(model=model, read_only=True) for model in ("warm", "cold"))
    assert sum(warm.contains(keys[:100])) == 100
    assert sum(cold.contains(keys[:100])) < 100


def test_a_lowered_cap_is_trimmed_and_keeps_what_was_used_last(shop, keys):
    store = shop.open()
    shop.put(store, keys[:220])
    before = on_disk(shop.root)[0]
    time.sleep(1.1)
    shop.get(store, keys[100:120])
    store.close()
    store = shop.open(capacity_bytes=CAPACITY_NBYTES // 4)
    assert on_disk(shop.root)[0] <= CAPACITY_NBYTES // 4 < before
    assert all(store.contains(keys[100:120]))
    assert shop.get(store, keys[100:120]) == ["loaded"] * 20
    assert 20 <= store.stats()["pages"] < 100
    store.close()
    store = shop.open()  # and raised again, it grows
    assert shop.put(store, keys[:200]).count("capacity") == 0
    assert sum(store.contains(keys[:200])) == 200


def test_a_lowered_cap_takes_from_writers_that_are_gone(shop, keys):
    old = shop.open(model="old")
    shop.put(old, keys[:200])
    old.close()
    shop.open(model="new", capacity_bytes=CAPACITY_NBYTES // 4)
    assert on_disk(shop.root)[0] <= CAPACITY_NBYTES // 4


@pytest.mark.parametrize("end", ["close", "kill"])
def test_recency_survives(tmp_path, keys, end):
    root = tmp_path / "root"
    with StoreProcess(root, capacity_bytes=640 << 10) as worker:
        room = worker.call("put", salt="test", count=200).count("stored")
        worker.call("delete", salt="test", count=200)
        worker.call("put", salt="test", count=room)
        time.sleep(1.1)
        worker.call("get", salt="test", count=10, first=5)
        if end == "kill":
            # Access times are written a minute after the last at the earliest; a put writes them at once.
            worker.call("delete", salt="test", count=10, first=5)
            worker.call("put", salt="test", count=10, first=5)
            worker.kill()
    rig = StoreRig(root)
    store = rig.open(capacity_bytes=640 << 10)
    rig.put(store, keys_of("other", room - 10))
    assert [at for at, there in enumerate(store.contains(keys[:room])) if there] == list(range(5, 15))
    rig.close()


def test_after_a_restart_the_first_page_of_a_chain_is_kept_longest(shop, keys):
    store = shop.open(capacity_bytes=640 << 10)
    room = shop.put(store, keys[:200]).count("stored")
    store.close()
    store = shop.open(capacity_bytes=640 << 10)
    shop.put(store, keys_of("other", room - 7))
    assert store.match_prefix(keys) == 7


def test_the_default_is_bounded(tmp_path):
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert 0 < parse_capacity(None, tmp_path / "new") <= min(64 << 30, free // 4 + (1 << 30))


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_full_when_growing_is_a_refusal_and_reads_go_on(shop, keys, monkeypatch):
    store = shop.open()
    assert shop.put(store, keys[:8])[0] == "stored"
    there = sum(store.contains(keys[:8]))
    monkeypatch.setattr(os, "posix_fallocate", full_disk)
    writer_of(store)._free.take(len(writer_of(store)._free))
    writer_of(store).lru._heap.clear()  # nothing to evict either
    assert set(shop.put(store, keys[100:104])) == {"disk_full"}
    assert shop.get(store, keys[:8]) == ["loaded"] * there
    assert not list(shop.root.rglob("*.tmp"))


def test_a_disk_full_at_the_write_is_a_refusal_and_the_slot_comes_back(shop, keys, monkeypatch):
    store = shop.open()
    shop.put(store, keys[:4])
    free = len(writer_of(store)._free)
    with monkeypatch.context() as patch:
        patch.setattr(posix, "PWRITEV", lambda *_: -1)
        patch.setattr(posix, "vector_io", lambda *_, **__: errno.ENOSPC)
        assert shop.put(store, keys[4:8]) == ["disk_full"] * 4
        assert shop.get(store, keys[:4]) == ["loaded"] * 4
    assert len(writer_of(store)._free) == free
    assert shop.put(store, keys[4:8]) == ["stored"] * 4
    assert store.stats()["put"] == {"stored": 8, "disk_full": 4}
    assert vectors.PWRITEV


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 3 MiB."""
    path = tmp_path / "tiny"
    path.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "hct-test", path],
        capture_output=True,
        text=True,
        check=False,
    )
    if mount.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mount.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_small_disk_holds_what_it_can(tiny_disk, keys):
    rig = StoreRig(tiny_disk)
    store = rig.open(capacity_bytes=64 << 20)
    reasons = rig.put(store, keys)
    stored = reasons.count("stored")
    if stored == 0:
        assert set(reasons) == {"disk_full"}
    assert rig.get(store, keys[:stored]) == ["loaded"] * stored
    rig.close()
    (tiny_disk / "filler").write_bytes(b"x" * (os.statvfs(tiny_disk).f_bavail * 4096))
    try:
        store = rig.open(capacity_bytes=64 << 20)
    except StoreError as error:
        assert "space" in str(error)
    else:
        assert rig.get(store, keys[:stored]) == ["loaded"] * stored
        rig.close()


def test_a_victim_that_is_gone_already_counts_as_evicted(shop, keys):
    store = shop.open(capacity_bytes=640 << 10)
    shop.put(store, keys[:200])
    slab_of(store, 1).unlink()
    paths_of(store).table(1).unlink()
    assert set(shop.put(store, keys_of("other", 40))) == {"stored"}
    assert shop.get(store, keys_of("other", 40)) == ["loaded"] * 40
    assert PAGE_NBYTES * len(store) <= CAPACITY_NBYTES
