"""Children of fork, made at the worst moment, keep no lock of a root and no partition."""

from __future__ import annotations

import fcntl
import os
import signal
import time
import warnings

import pytest

from hicache_tier.testing.store_rig import StoreRig, paths_of
from hicache_tier_storage import writer
from hicache_tier_storage.capacity import writer_lock


@pytest.fixture
def shop(memory_path):
    shop = StoreRig(memory_path / "root")
    yield shop
    shop.close()


class Children:
    """Children of fork that use nothing of the store, and live until the test is over."""

    def __init__(self):
        self.pids = []

    def fork(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads are running
            pid = os.fork()
        if not pid:
            try:
                signal.alarm(60)
                while True:
                    signal.pause()
            finally:
                os._exit(0)
        self.pids.append(pid)
        time.sleep(0.05)  # it is past its first instructions


@pytest.fixture
def children():
    family = Children()
    yield family
    for pid in family.pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def is_free(lock):
    fd = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def test_a_child_forked_while_the_roots_lock_is_held_does_not_keep_it(shop, keys, children):
    store = shop.open()
    with store._budget.lock():
        children.fork()
        assert not is_free(shop.root / ".hct.lock")
    assert is_free(shop.root / ".hct.lock")
    assert set(shop.put(store, keys[:40])) == {"stored"}


def test_a_child_does_not_release_its_parents_locks(shop, children):
    store = shop.open()
    with store._budget.lock():
        children.fork()
        os.kill(children.pids[0], signal.SIGKILL)
        os.waitpid(children.pids.pop(), 0)
        assert not is_free(shop.root / ".hct.lock")
        assert not is_free(paths_of(store).lock)


def test_a_child_forked_during_an_opening_does_not_keep_the_partition(shop, keys, children, monkeypatch):
    store = shop.open()
    shop.put(store, keys[:20])
    store.close()
    real = writer.recover_pages

    def recover(*arguments, **options):
        children.fork()
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "recover_pages", recover)
        store = shop.open()
    store.close()
    store = shop.open()
    assert store.stats()["partition"].endswith("-w0/kv")
    assert store.stats()["pages"] == 20


def test_a_child_forked_while_a_dead_partition_is_looked_at_does_not_keep_it(shop, children):
    store = shop.open()
    paths = paths_of(store)
    store.close()
    with writer_lock(paths) as dead:
        assert dead
        children.fork()
    assert shop.open().stats()["partition"].endswith("-w0/kv")
