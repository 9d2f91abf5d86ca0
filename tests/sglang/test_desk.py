"""Calls of several stores, side by side, without SGLang."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hicache_tier.errors import ClosedError
from hicache_tier.integrations.sglang.pool import Pool
from hicache_tier.integrations.sglang.ranks import Ranks
from hicache_tier.integrations.sglang.view import PoolView
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.desk_rig import NAMES, PAGE, PAGES, HostPool, Rig, same, until
from hicache_tier_storage.calls import Lane


def test_pages_go_to_storage_and_come_back(rig):
    wanted = rig.content(range(16))
    assert rig.put(NAMES, range(16)) == ["stored"] * 16
    assert rig.look(NAMES) == 16
    rig.fill(2)
    assert rig.get(NAMES, range(16, 32)) == ["loaded"] * 16
    assert same(rig.content(range(16, 32)), wanted)


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


def test_an_interrupted_lookup_does_not_end_following(rig, monkeypatch):
    """By a signal that raises just as the caller's thread has taken a lock."""
    lock, followed = rig.desk._following, []

    def acquire(**how):
        taken = lock.acquire(**how)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return taken

    signalled = SimpleNamespace(acquire=acquire, release=lock.release, locked=lock.locked)
    monkeypatch.setattr(rig.pool.store, "follow", lambda: followed.append(1))
    with suppress(KeyboardInterrupt):
        rig.desk._following, rig.desk._followed_s = signalled, 0.0
        rig.look(NAMES)
    rig.desk._following, rig.desk._followed_s, followed[:] = lock, 0.0, []
    assert until(lambda: not lock.locked(), 5)
    rig.look(NAMES)
    assert until(lambda: followed, 5)


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
