"""Attacks on readers: descriptors that run out, files made anew or cut beneath them."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hicache_tier.geometry import KVGeometry
from hicache_tier.testing.array_pool import ArrayPool, fill_pages, keys_of
from hicache_tier.testing.faults import Fail, FaultyEngine, coming_in
from hicache_tier.testing.store_rig import (
    PAGE_NBYTES,
    paths_of,
    slab_of,
    slot_of,
    writer_of,
)
from hicache_tier_storage import growth, open_store, reader_partition
from hicache_tier_storage.journal import Journal
from hicache_tier_storage.posix import PosixEngine

A, B = keys_of("A", 64), keys_of("B", 64)


def until(condition, seconds=3.0):
    """Wait for what the next refreshes of a reader must bring."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def seen(reader, keys):
    return until(lambda: reader.match_prefix(keys) == len(keys))


def stop_polling(store):
    store._core.foreign._next_poll = time.monotonic() + 1e6


def poll(store):
    """Follow other writers now, scans of folders and tables included."""
    foreign = store._core.foreign
    foreign._next_poll = foreign._next_scan = 0.0
    store.match_prefix([])


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(reader_partition, "_GRACE_S", 0.1)


# -- slabs given up and made anew ---------------------------------------------------------------------------


def shed(store):
    with store._core.lock:
        assert store._core.shed()


def test_a_slab_made_anew_between_two_looks_is_seen(shop):
    writer = shop.open()
    shop.put(writer, A)
    reader = shop.open(read_only=True)
    assert reader.match_prefix(A) == 64
    stop_polling(reader)
    shed(writer)
    assert shop.put(writer, B[:20]) == ["stored"] * 20
    poll(reader)
    assert reader.match_prefix(B[:20]) == 20
    assert shop.get(reader, B[:20]) == ["loaded"] * 20
    assert not reader.stats()["damage"]


@pytest.mark.parametrize("journal", [True, False])
def test_a_slab_that_is_being_made_is_no_damage(shop, monkeypatch, journal):
    writer = shop.open()
    shop.put(writer, A)
    if not journal:
        paths_of(writer).journal.unlink()
    reader = shop.open(read_only=True)
    assert seen(reader, A)
    real = growth.create_slab

    def slow(*arguments):
        for _ in range(3):
            poll(reader)
            time.sleep(0.11)
        return real(*arguments)

    monkeypatch.setattr(growth, "create_slab", slow)
    shop.put(writer, B[:16])
    assert seen(reader, B[:16])
    assert not reader.stats()["damage"]


def test_a_slab_given_up_while_it_is_read_is_no_damage(shop):
    writer = shop.open()
    shop.put(writer, A)
    reader = shop.open(read_only=True)
    assert shop.get(reader, A) == ["loaded"] * 64
    stop_polling(reader)
    shed(writer)
    assert set(shop.get(reader, A)) == {"loaded", "changed"}
    for _ in range(3):
        time.sleep(0.11)
        poll(reader)
    assert sum(reader.contains(A)) == 48
    assert not reader.stats()["damage"]


def test_damage_that_lasts_is_reported_by_a_reader(shop):
    writer = shop.open()
    shop.put(writer, A)
    reader = shop.open(read_only=True)
    assert shop.get(reader, A) == ["loaded"] * 64
    slab_of(writer, 1).unlink()
    reasons = shop.get(reader, A)
    assert {reason.partition(":")[0] for reason in reasons} == {"loaded", "damaged"}
    assert sum(reader.contains(A)) == 48
    assert until(lambda: poll(reader) or reader.stats()["damage"])
    assert len(reader.stats()["damage"]) == 1
    assert shop.get(reader, A).count("loaded") == 48


# -- partitions and pools that come late --------------------------------------------------------------------


def test_a_pool_made_later_in_a_known_folder_is_found(tmp_path):
    layers = {"kv": 2, "draft": 1}
    pools = {
        name: KVGeometry.mha(num_layers=n, num_kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=8)
        for name, n in layers.items()
    }

    def opened(pool):
        options = {"model": "m", "pool": pool, "pools": pools, "capacity_bytes": 4 << 20}
        return open_store(tmp_path, pools[pool], "page_first", io_mode="buffered", threads=1, **options)

    with opened("kv") as kv, opened("draft") as draft, opened("kv"):
        for _ in range(3):
            poll(kv)
            poll(draft)
        with opened("draft") as late:
            host = ArrayPool(pools["draft"], "page_first", 4)
            fill_pages(host, range(4), A[:4], pools["draft"].page_nbytes)
            assert all(late.put(A[:4], host, range(4)))
            assert seen(draft, A[:4])
            assert not kv.match_prefix(A[:4])


@pytest.mark.parametrize("how", ["removed", "other_slabs"])
def test_a_partition_made_anew_is_followed(shop, how):
    writer = shop.open()
    shop.put(writer, A[:40])
    reader = shop.open(read_only=True)
    assert reader.match_prefix(A[:40]) == 40
    stop_polling(reader)
    writer.close()
    if how == "removed":
        shutil.rmtree(shop.root / writer.identity.namespace)
    writer = shop.open(capacity_bytes=120 << 10 if how == "other_slabs" else 2 << 20)
    assert shop.put(writer, B[:8]) == ["stored"] * 8
    for _ in range(2):
        poll(reader)
    assert reader.match_prefix(B[:8]) == 8
    assert shop.get(reader, B[:8]) == ["loaded"] * 8
    assert not any(reader.contains(A[:40]))
    shop.put(writer, B[8:9])
    assert seen(reader, B[:9] if how == "removed" else B[8:9])
    assert not reader.stats()["damage"]


def test_a_partition_whose_lock_is_touched_is_the_same(shop):
    writer = shop.open()
    shop.put(writer, A)
    reader = shop.open(read_only=True)
    before = list(reader._core.foreign.partitions.values())
    os.utime(paths_of(writer).lock)
    poll(reader)
    assert list(reader._core.foreign.partitions.values()) == before
    assert reader.match_prefix(A) == 64


def test_a_journal_made_anew_is_followed(shop):
    writer = shop.open()
    shop.put(writer, A[:4])
    reader = shop.open(read_only=True)
    assert seen(reader, A[:4])
    paths_of(writer).journal.unlink()
    writer.close()
    writer = shop.open()
    shop.put(writer, B[:4])
    assert seen(reader, B[:4])
    (followed,) = reader._core.foreign.partitions.values()
    assert until(lambda: poll(reader) or followed.followed)


# -- descriptors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["open", "list"])
def test_slabs_are_found_once_there_are_descriptors_again(shop, monkeypatch, caplog, what):
    writer = shop.open()
    shop.put(writer, A)
    reader = shop.open(read_only=True)
    assert reader.match_prefix(A) == 64
    stop_polling(reader)
    assert shop.put(writer, B) == ["stored"] * 64
    shed(writer)  # which makes readers scan
    kept = [key for key in B if key in writer]
    real = {"open": os.open, "listdir": os.listdir, "scandir": os.scandir}

    def none_left(name):
        def call(path, *arguments, **options):
            if str(path).startswith(str(shop.root)):
                raise OSError(errno.EMFILE, "Too many open files")
            return real[name](path, *arguments, **options)

        return call

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        for name in ["open"] if what == "open" else ["listdir", "scandir"]:
            patch.setattr(os, name, none_left(name))
        for _ in range(4):
            poll(reader)
            time.sleep(0.11)
        assert len(caplog.records) <= 2  # one a place, not one a look
    assert until(lambda: poll(reader) or all(reader.contains(kept)))
    assert shop.get(reader, kept) == ["loaded"] * len(kept)
    assert not reader.stats()["damage"]


def test_slabs_hold_no_descriptors_beyond_the_bound(shop):
    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    many = keys_of("many", 400)
    writer = shop.open(capacity_bytes=6 << 20)
    writer._cache._limit = 2
    before = descriptors()
    for at in range(0, 400, 40):
        shop.put(writer, many[at : at + 40])
    assert len(writer_of(writer).slabs) >= 12
    assert descriptors() - before <= 5
    reader = shop.open(read_only=True)
    reader._cache._limit = 2
    before = descriptors()
    assert shop.get(reader, many) == ["loaded"] * 400
    assert descriptors() - before <= 8  # as many files as an engine borrows at once


def test_a_map_outlives_its_table_as_long_as_somebody_looks_at_it(shop):
    store = shop.open()
    shop.put(store, A[:4])
    number, slot = slot_of(store, A[0])
    view = writer_of(store).tables.tables[number].words[slot]
    was = view.copy()
    store.close()
    assert (view[2:12] == was[2:12]).all()

    def mapped():
        return str(shop.root) in Path("/proc/self/maps").read_text()

    assert mapped()
    del view
    assert not mapped()


# -- copies -------------------------------------------------------------------------------------------------


@pytest.fixture
def twice(shop):
    """Two writers that stored the same pages in a race, and a reader."""
    first, second = shop.open(), shop.open()
    stop_polling(first)
    stop_polling(second)
    shop.put(first, A[:32])
    shop.put(second, A[:32])
    reader = shop.open(read_only=True)
    assert reader.match_prefix(A[:32]) == 32
    return {paths_of(store).root: store for store in (first, second)}, reader


def served_by(reader, stores, key):
    return stores[reader._core.foreign.index[key][0].paths.root]


@pytest.mark.parametrize("polled", [True, False])
def test_a_page_dropped_by_one_of_two_writers_stays_a_hit(shop, twice, polled):
    stores, reader = twice
    stop_polling(reader)
    served_by(reader, stores, A[0]).delete(A[:32])
    if polled:
        poll(reader)
        stop_polling(reader)
    assert reader.match_prefix(A[:32]) == 32
    assert shop.get(reader, A[:32]) == ["loaded"] * 32
    for store in stores.values():
        store.clear()
    assert set(shop.get(reader, A[:32])) == {"changed"}
    poll(reader)
    assert set(shop.get(reader, A[:32])) == {"absent"}


def test_a_damaged_copy_does_not_hide_a_good_one(shop, twice):
    stores, _ = twice
    reader = shop.open(read_only=True, verify="always")
    stop_polling(reader)
    bad = served_by(reader, stores, A[5])
    number, slot = slot_of(bad, A[5])
    with slab_of(bad, number).open("r+b") as file:
        file.seek(slot * PAGE_NBYTES)
        file.write(b"\xff" * 64)
    assert shop.get(reader, A[:32]) == ["loaded"] * 32
    assert served_by(reader, stores, A[5]) is not bad
    assert len(reader.stats()["damage"]) == 1


def test_a_damaged_page_of_ones_own_does_not_hide_anothers(shop):
    first, second = shop.open(verify="always"), shop.open()
    stop_polling(first)
    stop_polling(second)
    shop.put(first, A[:8])
    shop.put(second, A[:8])
    poll(first)
    number, slot = slot_of(first, A[5])
    with slab_of(first, number).open("r+b") as file:
        file.seek(slot * PAGE_NBYTES)
        file.write(b"\xff" * 64)
    assert shop.get(first, A[:8]) == ["loaded"] * 8
    assert A[5] not in first._core.index
    assert not writer_of(first).pins.any()


def test_copies_leave_nothing_behind(twice):
    stores, reader = twice
    for store in stores.values():
        store.clear()
    poll(reader)
    foreign = reader._core.foreign
    assert not foreign.index
    assert not foreign._copies
    assert not any(other.held for other in foreign.partitions.values())


# -- cut files and interrupts -------------------------------------------------------------------------------

FOLLOWER = """
import sys, time
from pathlib import Path
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import StoreRig

rig = StoreRig(Path(sys.argv[1]))
reader, keys = rig.open(read_only=True), keys_of("A", 64)
print("ready", flush=True)
end = time.monotonic() + 0.7
while time.monotonic() < end:
    reader._core.foreign._next_poll = 0
    reader.match_prefix(keys)
assert set(rig.get(reader, keys)) == {"loaded"}
"""


def test_a_journal_that_is_cut_ends_no_reader(shop):
    writer = shop.open()
    shop.put(writer, A)
    journal = paths_of(writer).journal
    size = journal.stat().st_size
    command = [sys.executable, "-c", FOLLOWER, str(shop.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        while child.poll() is None:
            os.truncate(journal, 0)
            os.truncate(journal, size)
    assert child.returncode == 0


def test_the_ring_is_read_across_its_end(tmp_path):
    path = tmp_path / "journal"
    writer = Journal(path, writable=True)
    for first in range(0, 65536 - 10, 32763):
        writer.append(np.arange(first, min(first + 32763, 65536 - 10)))
    reader = Journal(path, writable=False)
    writer.append(np.arange(100, 120))
    assert reader.changes().tolist() == list(range(100, 120))
    assert reader.changes().tolist() == []
    os.truncate(path, 4100)
    with pytest.raises(OSError, match="cut"):
        reader.changes()
    writer.append(np.arange(3))
    assert reader.changes() is None
    writer.append(np.array([7]))
    assert reader.changes().tolist() == [7]
    writer.close()
    reader.close()


def test_an_interrupt_leaves_no_page_pinned(shop):
    other = shop.open()
    shop.put(other, A[:8])
    interrupt = Fail(KeyboardInterrupt(), coming_in)
    interrupt.on = False
    engine = FaultyEngine(PosixEngine(direct=False, threads=1), interrupt)
    store = shop.open(engine=engine, io_mode="auto", threads=None)
    shop.put(store, B[:8])
    assert seen(store, A[:8])
    interrupt.on = True
    with pytest.raises(KeyboardInterrupt):
        shop.get(store, A[:8] + B[:8])
    interrupt.on = False
    writer = writer_of(store)
    assert not writer.pins.any()
    store.delete(B[:8])
    assert not writer._free.waiting
    assert shop.get(store, A[:8]) == ["loaded"] * 8
