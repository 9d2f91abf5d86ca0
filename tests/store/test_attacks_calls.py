"""Calls of a store that went wrong once: interrupted, raced, closed under one's hands, made in odd order."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hicache_tier.errors import ClosedError, InvalidArgumentError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.faults import FaultyEngine, Hang, going_out
from hicache_tier.testing.store_rig import writer_of
from hicache_tier_storage import putter
from hicache_tier_storage.eviction import LeafLru
from hicache_tier_storage.posix import PosixEngine


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def held():
    """Return an engine whose writes wait at a gate, and the gate."""
    hang = Hang(going_out)
    return FaultyEngine(PosixEngine(direct=False, threads=1), hang), hang.gate


def test_an_exception_right_after_the_claim_leaves_no_page_claimed(shop, keys, monkeypatch):
    store = shop.open()
    shop.chain(store, keys[:4])
    writer = writer_of(store)

    def interrupted(count):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "allocate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shop.chain(store, keys[:8])
    assert not store._core.writing
    assert not writer.pins.any()
    started = time.monotonic()
    assert shop.chain(store, keys[:8]) == ["already_stored"] * 4 + ["stored"] * 4
    assert time.monotonic() - started < 5


def test_nobody_waits_for_a_call_that_ended_without_letting_go(shop, keys, monkeypatch):
    store = shop.open()
    with monkeypatch.context() as patch:
        patch.setattr(putter.Putter, "_let_go", lambda self, claim: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            shop.put(store, keys[:3])
    store.delete(keys[:3])
    assert shop.put(store, keys[:5]) == ["stored"] * 5
    assert not store._core.writing


def test_a_put_waits_for_anothers_page_only_so_long(shop, keys, monkeypatch):
    monkeypatch.setattr(putter, "_WAIT_S", 0.2)
    engine, gate = held()
    store = shop.open(engine=engine, io_mode="auto", threads=None)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shop.put, store, keys[:3])
        gate.wait_for(1)
        started = time.monotonic()
        assert shop.put(store, keys[:3]) == ["lost_race"] * 3
        assert time.monotonic() - started < 5
        gate.open()
        assert first.result(10) == ["stored"] * 3
    assert shop.put(store, keys[:3]) == ["already_stored"] * 3


def test_a_stored_page_is_pinned_by_a_put_that_asks_for_it(shop, keys):
    store = shop.open()
    shop.put(store, keys[:4])
    assert shop.put(store, keys[:4], pin=True) == ["already_stored"] * 4
    for turn in range(4):
        shop.put(store, keys_of(f"other {turn}", 200))
    assert store.match_prefix(keys[:4]) == 4
    store.close()
    store = shop.open()
    assert writer_of(store).pinned.sum() == 4


def test_a_put_that_waited_for_another_pins_its_pages_too(shop, keys):
    engine, gate = held()
    store = shop.open(engine=engine, io_mode="auto", threads=None)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shop.put, store, keys[:3])
        gate.wait_for(1)
        second = pool.submit(shop.put, store, keys[:3], pin=True)
        time.sleep(0.1)
        gate.open()
        assert first.result(10) == ["stored"] * 3
        assert all(second.result(10))
    assert writer_of(store).pinned.sum() == 3


def test_a_page_of_another_writer_is_stored_again_where_it_is_to_be_kept(shop, keys):
    other, store = shop.open(), shop.open()
    shop.put(other, keys[:3])
    time.sleep(0.1)
    assert store.match_prefix(keys[:3]) == 3
    assert shop.put(store, keys[:3]) == ["already_stored"] * 3
    assert shop.put(store, keys[:3], pin=True) == ["stored"] * 3
    assert writer_of(store).pinned.sum() == 3
    assert len(store) == 3


def test_a_lookup_that_meets_close_maps_nothing_again(shop, keys):
    other = shop.open()
    shop.put(other, keys[:3])

    def lookup_during_close():
        store = shop.open()
        due = store._core.foreign.due

        def closing():
            store._core.foreign.due = due
            store.close()
            store._core.foreign._next_poll = store._core.foreign._next_scan = 0
            return True

        store._core.foreign.due = closing
        with pytest.raises(ClosedError):
            store.match_prefix(keys[:3])

    lookup_during_close()
    before = descriptors()
    for _ in range(3):
        lookup_during_close()
    assert descriptors() == before


def test_nothing_is_left_to_import_at_the_first_call():
    code = "import sys, hicache_tier_storage.store, numpy as n; n.random; a = set(sys.modules);"
    code += "n.unique(n.array([1])); n.isin(n.array([1]), [1]); sys.exit(len(set(sys.modules) - a))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("read_only", [False, True])
def test_a_key_may_be_a_view_of_memory_that_can_be_written(shop, keys, read_only):
    store = shop.open()
    shop.put(store, keys[:3])
    views = [memoryview(bytearray(key)) for key in keys[:4]]
    if read_only:
        views = [view.toreadonly() for view in views]
    assert store.match_prefix(views) == 3
    assert store.contains(views) == [True, True, True, False]
    views[0].release()
    for call in (store.match_prefix, store.contains):
        with pytest.raises(InvalidArgumentError, match="key"):
            call(views)


def test_an_engine_that_stores_share_outlives_one_of_them(shop, keys):
    engine = PosixEngine(direct=False, threads=2)
    first, second = (
        shop.open(model=model, engine=engine, io_mode="auto", threads=None) for model in ("a", "b")
    )
    for store in (first, second):
        shop.put(store, keys[:100])
    first.close()
    assert shop.get(second, keys[:100]) == ["loaded"] * 100
    second.close()
    third = shop.open(model="a", engine=engine, io_mode="auto", threads=None)
    assert shop.get(third, keys[:100]) == ["loaded"] * 100
    third.close()
    engine.close()


@pytest.mark.parametrize("killed", [False, True])
def test_pages_stored_while_the_clock_was_ahead_are_not_kept_for_good(shop, monkeypatch, killed):
    store = shop.open()
    old, new, more = keys_of("old", 200), keys_of("new", 100), keys_of("more", 100)
    ahead_s = 10 * 365 * 86_400
    real_s, real_ns = time.time, time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real_s() + ahead_s)
        patch.setattr(time, "time_ns", lambda: real_ns() + ahead_s * 10**9)
        shop.put(store, old)
    shop.put(store, new)
    assert store.match_prefix(new) == 100
    if killed:
        store._keeper.stop(5)
        writer_of(store).abandon()
        store._core.writer = None
    store.close()
    store = shop.open()
    shop.put(store, more)
    assert store.match_prefix(new) == 100
    assert store.match_prefix(more) == 100
    store.close()
    stamps = writer_of(shop.open())._times.stated
    assert stamps.max() <= real_s() + 1, "what is stated now is what the clock says"
    assert np.count_nonzero(stamps) > 200


def test_touched_pages_stay_recent_when_the_clock_goes_back(shop, monkeypatch):
    store = shop.open()
    cold, hot = keys_of("cold", 120), keys_of("hot", 120)
    shop.put(store, hot)
    shop.put(store, cold)
    real_s = time.time
    monkeypatch.setattr(time, "time", lambda: real_s() - 5000)
    assert shop.get(store, hot) == ["loaded"] * 120
    store.close()
    store = shop.open()
    shop.put(store, keys_of("more", 100))
    assert store.match_prefix(hot) == 120


class Counted(LeafLru):
    """Counts the pages that are looked at."""

    looks = 0

    def _entry(self, slot):
        self.looks += 1
        return super()._entry(slot)


@pytest.mark.parametrize("case", ["heads", "pinned", "pinned heads"])
def test_making_room_costs_the_same_whatever_is_in_the_way(case):
    count, turns = 4000, 50
    lru = Counted(count + turns)
    pinned = np.zeros(count + turns, np.bool_)
    pinned[: count // 2] = "pinned" in case
    shared = np.uint64(7) if "heads" in case else np.uint64(0)

    def add(slots):
        slots = np.asarray(slots, np.int64)
        heads = np.full(len(slots), shared) if shared else slots.astype(np.uint64) + np.uint64(1)
        lru.add(slots, heads, np.full(len(slots), shared))

    for first in range(0, count, 100):
        add(range(first, first + 100))
    assert len(lru.pop(1, lambda _: False, pinned)) == 1
    lru.looks = 0
    for turn in range(turns):
        (victim,) = lru.pop(1, lambda _: False, pinned)
        assert not pinned[victim]
        add([count + turn])
    assert lru.looks < 10 * turns
    lru.looks = 0
    lru.remove(range(0, count, 2))
    assert lru.looks < 10 * turns


def test_pages_that_were_pinned_go_when_their_time_comes_again():
    lru = LeafLru(8)
    pinned = np.zeros(8, np.bool_)
    none = np.zeros(1, np.uint64)
    for slot in range(6):
        lru.add(np.array([slot]), np.array([slot + 1], np.uint64), none)
    pinned[:3] = True
    assert lru.pop(2, lambda _: False, pinned) == [3, 4]
    pinned[1] = False
    lru.recall([1])
    assert lru.pop(1, lambda _: False, pinned) == [1]
    lru.remove([0])
    pinned[0] = False
    lru.recall([0])
    assert lru.pop(5, lambda _: False, pinned) == [5]
    pinned[:] = False
    lru.recall([2])
    assert lru.pop(5, lambda _: False, pinned) == [2]
    assert len(lru) == 0


def test_pages_in_a_ring_go_least_recent_first():
    lru = LeafLru(8)
    for slot in range(6):  # each goes on from the next
        own, parent = np.array([slot + 1], np.uint64), np.array([(slot + 1) % 6 + 1], np.uint64)
        lru.add(np.array([slot]), own, parent)
    assert lru.pop(1, {0, 1}.__contains__) == [2], "none is a leaf: the least recent that may go"
    assert lru.pop(6, lambda _: False) == [3, 4, 5, 0, 1]
    assert len(lru) == 0


def test_unpinned_pages_can_be_evicted_again(shop, keys):
    store = shop.open()
    shop.put(store, keys[:100], pin=True)
    shop.put(store, keys_of("more", 200))
    assert store.match_prefix(keys[:100]) == 100
    store.unpin(keys[:100])
    for turn in range(3):
        assert shop.put(store, keys_of(f"other {turn}", 200)) == ["stored"] * 200
    assert store.match_prefix(keys[:100]) == 0


def test_touched_pages_outlive_pages_that_were_stored_later(shop, keys):
    store = shop.open()
    hot, cold = keys[:50], keys_of("cold", 180)
    shop.chain(store, hot)
    shop.chain(store, cold)
    assert store.touch([*hot, b"absent"]) == [True] * 50 + [False]
    shop.put(store, keys_of("more", 150))
    assert store.match_prefix(hot) == 50
    other = shop.open(read_only=True)
    assert other.touch(hot[:2]) == [True, True]
    store.close()
    with pytest.raises(ClosedError):
        store.touch(hot)
