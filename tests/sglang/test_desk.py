"""Deadlines, breaker and threads, without SGLang: storage that is slow, hangs, fails, or comes back."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hicache_tier.errors import ClosedError, StoreError
from hicache_tier.integrations.sglang.desk import Desk
from hicache_tier.integrations.sglang.health import Health
from hicache_tier.integrations.sglang.options import Options
from hicache_tier.integrations.sglang.pace import Pace
from hicache_tier.integrations.sglang.pool import Pool
from hicache_tier.integrations.sglang.ranks import Ranks
from hicache_tier.integrations.sglang.tally import Tally
from hicache_tier.integrations.sglang.view import PoolView
from hicache_tier.testing.array_pool import keys_of
from hicache_tier_storage.calls import Lane
from hicache_tier_storage.posix import PosixEngine

PAGE = 8
PAGES = 32


class HostPool:
    """An MHA host pool in layout page_first, as SGLang describes one."""

    layout, dtype, page_size, size = "page_first", torch.float16, PAGE, PAGE * PAGES
    layer_num, head_num, head_dim, v_head_dim, size_per_token = 3, 2, 16, 16, 1

    def __init__(self):
        self.kv_buffer = torch.zeros(2, self.size, 3, 2, 16, dtype=torch.float16)

    def get_page_buffer_meta(self, indices):
        row = self.kv_buffer[0, 0].numel() * 2
        base, half = self.kv_buffer.data_ptr(), self.kv_buffer[0].numel() * 2
        firsts = indices.tolist()[::PAGE]
        pointers = [base + first * row + part for first in firsts for part in (0, half)]
        return pointers, [PAGE * row] * len(pointers)

    @property
    def raw(self):
        return self.kv_buffer.view(torch.uint8).reshape(-1).numpy()


class Moody(PosixEngine):
    """An engine that waits before and after it moves bytes, or fails."""

    lands = False

    def __init__(self):
        super().__init__(direct=False, threads=2)
        self.delay_s = dict.fromkeys(("read", "write"), 0.0)
        self.free = threading.Event()
        self.free.set()
        self.fails = False
        self.swallows = False
        self.end = threading.Event()
        self.calls = []

    def read(self, batch):
        return self._do("read", super().read, batch)

    def write(self, batch):
        return self._do("write", super().write, batch)

    def _do(self, op, move, batch):
        self.calls.append(op)
        if self.swallows:
            self.end.wait(60)
        time.sleep(self.delay_s[op] / 2)
        self.free.wait(30)
        if self.fails:
            return ["io_error: Input/output error"] * len(batch)
        reasons = move(batch)
        time.sleep(self.delay_s[op] / 2)
        return reasons


class Rig:
    def __init__(self, root, engine, weights=lambda: None, **options):
        defaults = {"deadline_s": 4, "probe_interval_s": 0.2, "capacity_bytes": "64 MiB", "metrics": False}
        self.options = Options.parse({"root": str(root), **defaults, **options})
        self.host, self.engine = HostPool(), engine
        ranks = Ranks("m", (0, 1), (0, 1), (0, 1), replicated=False, writer=True)
        self.tally = Tally("tp0", None)
        self.desk = Desk(self.options, self.tally, weights=weights)
        view = PoolView(self.host, "kv")
        self.pool = Pool(view, self.options, ranks, {}, engine=engine)
        self.desk.pools["kv"] = self.pool

    def pages(self, names, pages):
        return self.pool.in_place(names, np.array(pages, np.int64))

    def put(self, names, pages):
        return [status.reason for status in self.desk.put([self.pages(names, pages)])[0]]

    def get(self, names, pages):
        return [status.reason for status in self.desk.get([self.pages(names, pages)])[0]]

    def look(self, names):
        return self.pool.match(names) if self.desk.may_look() else 0

    def fill(self, seed=1):
        self.host.raw[:] = np.random.default_rng(seed).integers(0, 256, self.host.raw.size, np.uint8)

    def content(self, pages):
        return [self.host.kv_buffer[:, page * PAGE : (page + 1) * PAGE].clone() for page in pages]


@pytest.fixture
def engine():
    engine = Moody()
    yield engine
    engine.free.set()
    engine.end.set()
    engine.close()


@pytest.fixture
def rig(tmp_path, engine):
    rig = Rig(tmp_path / "root", engine)
    rig.fill()
    yield rig
    engine.free.set()
    engine.delay_s = dict.fromkeys(engine.delay_s, 0.0)
    rig.desk.close()


NAMES = keys_of("desk", 16)


def until(so, timeout_s=10.0):
    until_s = time.monotonic() + timeout_s
    while not so():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True


def same(ours, others):
    return all(
        torch.equal(one.view(torch.uint8), two.view(torch.uint8))
        for one, two in zip(ours, others, strict=True)
    )


def test_pages_go_to_storage_and_come_back(rig):
    wanted = rig.content(range(16))
    assert rig.put(NAMES, range(16)) == ["stored"] * 16
    assert rig.look(NAMES) == 16
    rig.fill(2)
    assert rig.get(NAMES, range(16, 32)) == ["loaded"] * 16
    assert same(rig.content(range(16, 32)), wanted)


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


def test_slow_storage_opens_a_breaker_that_closes_by_itself(rig, engine):
    assert rig.put(NAMES, range(16)) == ["stored"] * 16
    engine.delay_s["read"] = engine.delay_s["write"] = 2.0
    rig.desk.deadline_s = 0.3
    assert rig.get(NAMES[:4], range(4)) == ["late"] * 4
    assert rig.look(NAMES) == 0
    started_s = time.monotonic()
    assert rig.get(NAMES, range(16)) == ["breaker_open"] * 16
    assert rig.put(keys_of("more", 3), range(3)) == ["breaker_open"] * 3
    assert time.monotonic() - started_s < 1.0
    assert rig.tally.reasons["set", "breaker_open"] == 3
    rig.desk.deadline_s = 4
    engine.delay_s = dict.fromkeys(engine.delay_s, 0.0)
    assert until(lambda: rig.look(NAMES) == 16)  # with no call of ours but lookups
    assert rig.get(NAMES, range(16)) == ["loaded"] * 16
    assert until(lambda: rig.put(keys_of("more", 3), range(3)) == ["stored"] * 3)
    assert not rig.desk.health.writes_open


def test_a_breaker_closes_although_the_calls_that_opened_it_never_return(tmp_path, engine):
    rig = Rig(tmp_path / "root", engine, probe_interval_s=0.02)
    rig.fill()
    assert rig.put(NAMES, range(16)) == ["stored"] * 16
    rig.desk.deadline_s = 0.1
    engine.swallows = True
    assert rig.get(NAMES[:2], range(2)) == ["late"] * 2
    assert until(lambda: engine.calls.count("read") > 6, 30.0)  # the read, and tries of storage
    rig.desk.deadline_s = 4
    engine.swallows = False
    assert until(lambda: rig.look(NAMES) == 16, 30.0)
    assert rig.get(NAMES[:2], range(2)) == ["loaded"] * 2
    engine.end.set()
    rig.desk.close()


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


def test_writes_that_are_late_do_not_close_off_reads_that_are_not(rig, engine):
    assert rig.put(NAMES, range(16)) == ["stored"] * 16
    engine.delay_s["write"] = 2.0
    rig.desk.health = Health(3600)
    rig.desk.deadline_s = 0.3
    assert rig.put(keys_of("more", 3), range(3)) == ["late"] * 3
    rig.desk.deadline_s = 4
    assert rig.desk.health.writes_open
    assert until(lambda: rig.look(NAMES) == 16)
    assert rig.get(NAMES, range(16)) == ["loaded"] * 16
    assert rig.put(keys_of("more", 3), range(3)) == ["breaker_open"] * 3


def test_what_was_done_in_time_counts(tmp_path, engine):
    rig = Rig(tmp_path / "root", engine, deadline_s=2.0)
    rig.fill()
    assert rig.put(NAMES, range(16)) == ["stored"] * 16
    rig.pool.paces["get"].pages = 1
    engine.delay_s["read"] = 0.3
    wanted = rig.content(range(16))
    rig.fill(2)
    reasons = rig.get(NAMES, range(16))
    loaded = reasons.count("loaded")
    assert reasons == ["loaded"] * loaded + ["late"] * (16 - loaded)
    assert 1 <= loaded <= 8
    assert same(rig.content(range(loaded)), wanted[:loaded])
    rig.desk.close()


def test_a_batch_is_cut_as_fine_as_storage_is_slow():
    pace = Pace(1 << 20, 3.0)
    assert pace.pages == 64
    pace.learn(0, 1.0)
    assert pace.pages == 64
    for _ in range(8):
        pace.learn(128, 0.1)
    assert pace.pages > 900
    for _ in range(12):
        pace.learn(1, 1.0)
    assert pace.pages == 1


def test_errors_of_storage_are_misses_with_their_reason(rig, engine, caplog):
    assert rig.put(NAMES[:4], range(4)) == ["stored"] * 4
    engine.fails = True
    assert set(rig.get(NAMES[:4], range(4))) == {"io_error: Input/output error"}
    assert set(rig.put(NAMES[4:6], range(2))) == {"io_error: Input/output error"}
    assert not rig.desk.health.reads_open  # it answers
    rig.pool.store.close()
    assert rig.get(NAMES[:4], range(4)) == ["error: closed"] * 4
    assert rig.put(NAMES[:4], range(4)) == ["error: closed"] * 4
    assert "get of pool kv failed: " in caplog.text


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


def test_stores_are_closed_where_no_thread_can_be_started(rig, monkeypatch):
    """As at the end of an interpreter, where SGLang detaches."""
    assert rig.put(NAMES, range(16)) == ["stored"] * 16

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    rig.desk.close()
    monkeypatch.undo()
    with pytest.raises(ClosedError):
        rig.pool.store.match_prefix(NAMES)


def test_gets_and_puts_go_side_by_side(tmp_path, engine):
    rig = Rig(tmp_path / "root", engine, deadline_s=4)
    assert rig.put(NAMES[:4], range(4)) == ["stored"] * 4
    engine.free.clear()
    answers = {}
    threads = [
        threading.Thread(target=lambda: answers.update(get=rig.get(NAMES[:4], range(8, 12)))),
        threading.Thread(target=lambda: answers.update(put=rig.put(NAMES[4:8], range(4, 8)))),
    ]
    for thread in threads:
        thread.start()
    assert until(lambda: engine.calls[-2:] in (["read", "write"], ["write", "read"]), 3.5)
    engine.free.set()
    for thread in threads:
        thread.join()
    assert answers == {"get": ["loaded"] * 4, "put": ["stored"] * 4}
    rig.desk.close()


def test_a_read_only_adapter_drops_sets(tmp_path, engine):
    writer = Rig(tmp_path / "root", engine)
    writer.fill()
    assert writer.put(NAMES, range(16)) == ["stored"] * 16
    reader = Rig(tmp_path / "root", engine, read_only=True)
    assert until(lambda: reader.look(NAMES) == 16)
    assert reader.get(NAMES, range(16)) == ["loaded"] * 16
    assert same(reader.content(range(16)), writer.content(range(16)))
    assert reader.put(keys_of("more", 2), range(2)) == ["read_only"] * 2
    for rig in (reader, writer):
        rig.desk.close()


def test_lookups_find_what_others_store(tmp_path, engine):
    one, two = Rig(tmp_path / "root", engine), Rig(tmp_path / "root", engine)
    one.fill()
    assert two.look(NAMES) == 0
    assert one.put(NAMES, range(16)) == ["stored"] * 16
    assert until(lambda: two.look(NAMES) == 16)
    for rig in (one, two):
        rig.desk.close()


def test_once_the_weights_are_others_nothing_is_found_loaded_or_stored(tmp_path, engine):
    version = ["1"]
    rig = Rig(tmp_path / "root", engine, weights=lambda: version[0])
    rig.fill()
    assert rig.put(NAMES, range(16)) == ["stored"] * 16
    version[0] = "2"
    before = rig.host.raw.copy()
    assert rig.look(NAMES) == 0
    assert rig.get(NAMES, range(16, 32)) == ["weights_changed"] * 16
    assert (rig.host.raw == before).all()
    more = keys_of("more", 3)
    assert rig.put(more, range(3)) == ["weights_changed"] * 3
    version[0] = "1"
    assert rig.look(NAMES) == 16
    assert rig.look(more) == 0
    rig.desk.close()


def test_a_call_may_be_of_more_pools_than_there_are_threads(tmp_path, engine):
    rig = Rig(tmp_path / "root", engine, threads_per_direction=2)
    rig.fill()
    parts = [rig.pages(NAMES[at : at + 2], range(at, at + 2)) for at in range(0, 10, 2)]
    assert [[one.reason for one in verdicts] for verdicts in rig.desk.put(parts)] == [["stored"] * 2] * 5
    rig.desk.close()


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


def test_a_name_that_begins_with_another_models_path_is_not_that_model(tmp_path, engine):
    def model(served, path):
        rig = Rig(tmp_path / "root", engine)
        ranks = Ranks(served, (0, 1), (0, 1), (0, 1), replicated=False, writer=True)
        pool = Pool(PoolView(rig.host, "kv"), rig.options, ranks, {"model_path": path}, engine=engine)
        pool.store.close()
        rig.desk.close()
        return pool.store.identity.model

    assert model("org/m-chat", "org/m-chat") == "org/m-chat"
    assert model("org/m-chat", "org/m") == 'org/m-chat #{"model_path":"org/m"}'


def test_lane_threads_end_when_it_closes():
    lane = Lane("sglang-test", 4)
    calls = [lane.start(lambda number=number: number * 2) for number in range(4)]
    assert all(call.wait(time.monotonic() + 5) for call in calls)
    assert [call.result for call in calls] == [0, 2, 4, 6]
    failing = lane.start(lambda: 1 // 0)
    assert failing.wait(time.monotonic() + 5)
    assert isinstance(failing.error, ZeroDivisionError)
    assert lane.drain(time.monotonic() + 5)
    lane.close()
    assert lane.start(lambda: None) is None
    assert until(lambda: not any(t.name == "hct-sglang-test" for t in threading.enumerate()))


@pytest.mark.parametrize("io_mode", ["buffered", "auto"])
def test_lookups_gets_and_puts_at_once_in_a_store_that_is_full(tmp_path, io_mode):
    """Two servers evict from one small root while they read: what is said to be loaded is right."""
    rigs = [
        Rig(tmp_path / "root", None, io_mode=io_mode, capacity_bytes="1 MiB", deadline_s=4) for _ in range(2)
    ]
    names = keys_of("full", 400)
    over, wrong, loaded = threading.Event(), [], []

    def content(name):
        raw = np.frombuffer(name * (rigs[0].host.raw.size // PAGES // 32 + 1), np.uint8)
        return torch.from_numpy(raw[: 2 * PAGE * 3 * 2 * 16 * 2].copy()).view(torch.float16)

    def serve(rig, seed, half):
        chance = np.random.default_rng(seed)
        while not over.is_set():
            first = int(chance.integers(0, len(names) - 8))
            batch, pages = names[first : first + 8], list(range(half, half + 8))
            for name, page in zip(batch, pages, strict=True):
                part = rig.host.kv_buffer[:, page * PAGE : (page + 1) * PAGE]
                part.copy_(content(name).reshape(part.shape))
            rig.put(batch, pages)
            rig.look(names[first:])
            pages = list(range(half + 8, half + 16))
            for name, page, reason in zip(batch, pages, rig.get(batch, pages), strict=True):
                if reason == "loaded":
                    loaded.append(1)
                    (got,) = rig.content([page])
                    if not same([got.reshape(-1)], [content(name)]):
                        wrong.append((name, reason))

    threads = [
        threading.Thread(target=serve, args=(rig, number * 2 + half // 16, half))
        for number, rig in enumerate(rigs)
        for half in (0, 16)
    ]
    for thread in threads:
        thread.start()

    def busy():
        evictions = sum(rig.pool.store.stats()["evictions"] for rig in rigs)
        return bool(wrong) or (len(loaded) > 500 and evictions > 200)

    enough = until(busy, 30.0)
    over.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert not wrong
    assert enough
    for rig in rigs:
        rig.desk.close()


def test_a_plain_pool_needs_nothing_beside_its_model(rig):
    assert rig.pool.store.identity.model == "m"
    assert rig.pool.view.geometry.components[0].heads == 2
    assert isinstance(rig.pool.view.pool, HostPool)
    assert SimpleNamespace(**rig.pool.view.facts) == SimpleNamespace()
