"""Calls on threads of their own whose caller is interrupted as they return."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from hicache_tier import HostPool
from hicache_tier.testing.array_pool import fill_pages, keys_of
from hicache_tier.testing.store_rig import GEOMETRY, PAGE_NBYTES
from hicache_tier_storage import bounded, open_store
from hicache_tier_storage.calls import Call, Lane

PATIENCE_S = 60.0
KEYS = keys_of("calls", 8)


class Signalled:
    """A lock that is taken in vain: a signal raises before whoever waited for it learns that it is taken."""

    def __init__(self, lock):
        self._lock = lock
        self.release = lock.release

    def acquire(self, **how):
        self._lock.acquire(**how)
        raise KeyboardInterrupt


def interrupt_waits(monkeypatch):
    """Have every wait for a call end by a signal, just as the call has returned."""
    made = Call.__init__

    def make(call, work):
        made(call, work)
        call._gate = Signalled(call._gate)

    monkeypatch.setattr(Call, "__init__", make)
    return monkeypatch


def until(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_call_that_returned_as_its_wait_was_interrupted_has_returned(monkeypatch):
    interrupt_waits(monkeypatch)
    call, late = Call(lambda: 3), []
    call.run()
    assert call.wait(0.0)
    call = Call(lambda: 3)
    threading.Timer(0.05, call.run).start()
    with pytest.raises(KeyboardInterrupt):
        call.wait(time.monotonic() + PATIENCE_S)
    until(lambda: call._returned)
    call.leave(lambda: late.append(call.outcome()))
    assert late == [3]
    assert call.wait(0.0)
    assert call.wait(0.0)


def test_interrupted_gets_give_every_page_back_and_count_as_hung_no_more(memory_path, monkeypatch):
    options = {"capacity_bytes": "2 MiB", "deadline_s": PATIENCE_S}
    with (
        HostPool(GEOMETRY, "page_first", 8, pinned=False) as host,
        open_store(memory_path / "root", GEOMETRY, "page_first", **options) as store,
    ):
        interrupt_waits(monkeypatch)
        for turn in range(2 * bounded._MOST_LATE):
            pages = host.alloc(8)
            fill_pages(host, pages, KEYS, PAGE_NBYTES)
            with pytest.raises(KeyboardInterrupt):
                (store.put if turn == 0 else store.get)(KEYS, host, pages)
            host.free(pages)
            until(lambda: host.free_pages == 8 and not store._late)
            until(lambda: not store.stats()["calls_in_flight"])
        monkeypatch.undo()
        assert all(store.get(KEYS, host, host.alloc(8)))


def test_a_call_that_no_thread_is_given_is_not_counted(monkeypatch):
    """Interrupted before it is given to a thread, it is not under way for good."""
    lane = Lane("test", 1)

    def interrupt(call, work):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Call, "__init__", interrupt)
        lane.start(lambda: 3)
    assert lane.in_flight == 0
    call = lane.start(lambda: 3)
    assert call.wait(time.monotonic() + PATIENCE_S)
    lane.close()
    assert lane.join(time.monotonic() + PATIENCE_S)


def test_a_look_that_is_interrupted_as_it_gets_the_lock_lets_go_of_it(tmp_path):
    def interrupt(frame, event, what):
        if (
            frame.f_code.co_name == "briefly"
            and event == "c_return"
            and what.__name__ in {"acquire", "extend"}
        ):
            sys.setprofile(None)
            raise KeyboardInterrupt

    with open_store(tmp_path, GEOMETRY, "page_first", capacity_bytes="8 MiB", deadline_s=None) as store:
        sys.setprofile(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                store.touch(KEYS)
        finally:
            sys.setprofile(None)
        assert not store._core.lock.locked()
