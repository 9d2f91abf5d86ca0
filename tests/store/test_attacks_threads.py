"""Attacks on the threads that move pages: none can be started, helpers fail or come late."""

from __future__ import annotations

import threading
import time

import pytest

from hicache_tier.testing.array_pool import ArrayPool, blank_pages, keys_of, read_page
from hicache_tier.testing.store_rig import (
    GEOMETRY,
    PAGE_NBYTES,
)
from hicache_tier_storage import posix

A, B = keys_of("A", 64), keys_of("B", 64)


@pytest.fixture
def second_thread_fails(monkeypatch):
    """The second thread of an engine cannot be started, as under a limit on processes."""
    real, started = threading.Thread.start, []

    def start(thread):
        if thread.name.startswith("hct-io"):
            started.append(thread)
            if len(started) == 2:
                raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return started


def test_pages_are_stored_where_no_thread_can_be_started(shop, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    store = shop.open(threads=3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert shop.put(store, A) == ["stored"] * 64
        assert shop.get(store, A) == ["loaded"] * 64
    assert shop.get(store, A) == ["loaded"] * 64


def test_no_helper_is_at_the_pages_once_get_has_returned(shop, second_thread_fails, monkeypatch):
    host = ArrayPool(GEOMETRY, "page_first", 64)
    store = shop.open(threads=1)
    shop.put(store, A)
    store.close()
    store = shop.open(threads=3, deadline_s=None)  # straight to the pages
    real, inside, after = posix.PREADV, threading.Event(), []
    returned = threading.Event()

    def slow(*arguments):
        if threading.current_thread().name.startswith("hct-io"):
            inside.set()
            time.sleep(0.2)
            after.append(returned.is_set())
        else:
            assert inside.wait(5)
        return real(*arguments)

    monkeypatch.setattr(posix, "PREADV", slow)
    assert all(store.get(A, host, range(64)))
    returned.set()
    assert len(second_thread_fails) == 2
    blank_pages(host, range(64), PAGE_NBYTES)
    time.sleep(0.3)
    assert all(read_page(host, page) == b"\xa5" * PAGE_NBYTES for page in range(64))
    assert after
    assert not any(after)


def test_a_helper_that_comes_late_touches_nothing(shop, monkeypatch):
    """Its task was queued although `submit` raised; another thread takes it up much later."""
    store = shop.open(threads=3)
    queued = []

    def submit(self, task, *arguments):
        queued.append(lambda: task(*arguments))
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(posix.DaemonPool, "submit", submit)
        assert shop.put(store, A) == ["stored"] * 64
    assert queued
    moved = []
    monkeypatch.setattr(posix, "PWRITEV", lambda *arguments: moved.append(arguments))
    for task in queued:
        task()
    assert not moved


def test_a_helpers_failure_is_the_calls(shop, monkeypatch):
    store = shop.open(threads=2)
    real, failed = posix.PWRITEV, threading.Event()

    def write(*arguments):
        if threading.current_thread().name.startswith("hct-io"):
            failed.set()
            raise ValueError("a helper's")
        assert failed.wait(5)
        return real(*arguments)

    monkeypatch.setattr(posix, "PWRITEV", write)
    assert set(shop.put(store, A)) == {"engine_error: ValueError: a helper's"}
