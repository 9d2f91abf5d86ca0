"""Calls that hang, without SGLang: they end in time, touch nothing later, and keep nothing."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from hicache_tier.errors import StoreError
from hicache_tier.integrations.sglang.health import Health
from hicache_tier.testing.desk_rig import NAMES, Rig, same, until


def test_a_get_that_hangs_is_a_miss_in_time_and_never_writes_later(rig, engine):
    assert rig.put(NAMES, range(16)) == ["stored"] * 16
    rig.fill(2)
    rig.desk.deadline_s = 0.3
    engine.free.clear()
    started_s = time.monotonic()
    assert rig.get(NAMES[:8], range(8)) == ["late"] * 8
    assert time.monotonic() - started_s < 3.0
    before = rig.host.raw.copy()
    engine.free.set()
    assert until(lambda: rig.desk._lanes["get"].in_flight == 0)
    time.sleep(0.05)
    assert (rig.host.raw == before).all()
    assert rig.tally.reasons["get", "late"] == 8


def test_a_put_that_hangs_is_not_stored_and_stores_nothing_later(rig, engine):
    rig.desk.deadline_s = 0.3
    engine.free.clear()
    started_s = time.monotonic()
    assert rig.put(NAMES[:8], range(8)) == ["late"] * 8
    assert time.monotonic() - started_s < 3.0
    rig.fill(2)  # as SGLang gives the pages to somebody else
    rig.desk.deadline_s = 4
    engine.free.set()
    assert until(lambda: rig.desk._lanes["set"].in_flight == 0)
    assert rig.pool.match(NAMES) == 0
    assert until(lambda: rig.put(NAMES[:8], range(8)) == ["stored"] * 8)
    wanted = rig.content(range(8))
    rig.fill(3)
    assert until(lambda: rig.get(NAMES[:8], range(8)) == ["loaded"] * 8)
    assert same(rig.content(range(8)), wanted)


def test_gauges_that_hang_take_one_thread(rig, monkeypatch):
    entered, leave = [], threading.Event()

    def stats():
        entered.append(1)
        leave.wait(30)
        return {}

    monkeypatch.setattr(rig.tally, "_instruments", SimpleNamespace(set=lambda *_: None, add=lambda *_: None))
    monkeypatch.setattr(rig.pool.store, "stats", stats)
    calls = [rig.desk._side.start(rig.desk.sample) for _ in range(4)]
    assert until(lambda: len(entered) == 1 and rig.desk._side.in_flight == 1)
    leave.set()
    assert all(call.wait(time.monotonic() + 10) for call in calls)
    assert len(entered) == 1


def test_hung_calls_take_threads_up_to_a_bound(tmp_path, engine):
    rig = Rig(tmp_path / "root", engine, threads_per_direction=2, probe_interval_s=3600)
    rig.desk.deadline_s = 60.0  # whatever else the machine does
    assert rig.put(NAMES, range(16)) == ["stored"] * 16
    rig.desk.deadline_s = 0.1
    engine.free.clear()
    for _ in range(2):
        rig.desk.health = Health(3600)
        assert rig.get(NAMES[:2], range(2)) == ["late"] * 2
    rig.desk.health = Health(3600)
    started_s = time.monotonic()
    assert rig.get(NAMES[:2], range(2)) == ["too_many_calls"] * 2
    assert time.monotonic() - started_s < 1.0
    engine.free.set()
    rig.desk.close()


def test_a_store_that_does_not_open_is_given_up_and_closed_once_it_does(rig, monkeypatch):
    monkeypatch.setattr("hicache_tier.integrations.sglang.desk._OPEN_S", 0.2)
    opened, closed = threading.Event(), threading.Event()

    def make():
        opened.wait(10)
        return SimpleNamespace(store=SimpleNamespace(close=closed.set))

    with pytest.raises(StoreError, match="did not open within"):
        rig.desk.open(make)
    opened.set()
    assert closed.wait(5)
    assert rig.desk.open(lambda: rig.pool) is rig.pool
    with pytest.raises(ZeroDivisionError):
        rig.desk.open(lambda: 1 // 0)


def test_close_ends_in_time_however_storage_hangs(rig, engine):
    rig.desk.deadline_s = 0.3
    engine.free.clear()
    assert rig.put(NAMES, range(16)) == ["late"] * 16
    started_s = time.monotonic()
    rig.desk.close()
    assert time.monotonic() - started_s < 9.0
    assert rig.get(NAMES, range(16))[0] in {"closed", "breaker_open"}
    assert rig.look(NAMES) == 0


def test_what_is_late_keeps_no_memory_once_all_is_closed(tmp_path, engine):
    rig = Rig(tmp_path / "root", engine)
    rig.desk.deadline_s = 0.3
    engine.free.clear()
    assert rig.put(NAMES, range(16)) == ["late"] * 16
    engine.free.set()
    assert until(lambda: rig.desk._lanes["set"].in_flight == 0)
    rig.desk.close()
    with pytest.raises(StoreError, match="closed"):
        rig.desk.open(lambda: rig.pool)
    desk, memory = rig.desk, weakref.ref(rig.host.kv_buffer)
    rig.host = rig.pool = None
    gc.collect()
    assert memory() is None
    assert desk.pools == {}
