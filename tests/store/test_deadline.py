"""Storage that never answers: every call ends by its deadline; of an abandoned one nothing is used again."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from hicache_tier import HostPool
from hicache_tier.errors import ClosedError, DoubleFreeError, InvalidArgumentError
from hicache_tier.testing.array_pool import (
    ArrayPool,
    blank_pages,
    fill_pages,
    keys_of,
    pages_equal,
    read_page,
)
from hicache_tier.testing.faults import FaultyEngine, Hang
from hicache_tier.testing.store_rig import GEOMETRY, PAGE_NBYTES, writer_of
from hicache_tier_storage import bounded, open_store, opening
from hicache_tier_storage.bounded import BoundedStore, DeadlineError
from hicache_tier_storage.posix import PosixEngine
from hicache_tier_storage.store import PageStore

DEADLINE_S = 0.3
PATIENCE_S = 60.0  # where nothing hangs
SOON_S = 5.0  # beyond the deadline, on a machine with other things to do
KEYS = keys_of("deadline", 8)
BLANK = b"\xa5" * PAGE_NBYTES


class Rig:
    """A store over an engine that can be told to hang, with eight pages stored in it."""

    def __init__(self, root, *, lands=True, after=False, deadline_s=DEADLINE_S, **options):
        self.root, self.deadline_s = root, deadline_s
        self.hang = Hang(after=after)
        self.hang.on = False
        self.engine = FaultyEngine(PosixEngine(direct=False, threads=2), self.hang)
        self.engine.lands = lands
        options = {"deadline_s": PATIENCE_S, "capacity_bytes": "2 MiB", "engine": self.engine} | options
        self.store = open_store(root, GEOMETRY, "page_first", **options)
        self.pool = ArrayPool(GEOMETRY, "page_first", 16)
        fill_pages(self.pool, range(8), KEYS, PAGE_NBYTES)
        assert all(self.store.put(KEYS, self.pool, range(8)))

    def hangs(self):
        """Hang from now on; calls have the deadline of the test."""
        self.store.deadline_s = self.deadline_s
        self.hang.on = True

    def works(self):
        """Hang no more; what hung stays where it is, new calls may take as long as a busy machine takes."""
        self.hang.on = False
        self.store.deadline_s = PATIENCE_S

    def answers(self):
        """Hang no more, and have what hung return."""
        self.works()
        self.hang.gate.open()

    def close(self):
        self.hang.gate.open()
        self.store.close()
        self.engine.close()


@pytest.fixture
def rig(tmp_path):
    rigs = []

    def make(**options):
        rigs.append(Rig(tmp_path / "root", **options))
        return rigs[-1]

    yield make
    for one in rigs:
        one.close()


def bounded_call(call, bound_s=DEADLINE_S + SOON_S):
    started = time.monotonic()
    answer = call()
    assert time.monotonic() - started < bound_s
    return answer


def kinds(statuses):
    return {status.kind for status in statuses}


def until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("lands", [False, True])
def test_a_get_that_hangs_is_a_miss_and_its_memory_the_callers_again(rig, lands, after):
    one = rig(lands=lands, after=after)
    pool = ArrayPool(GEOMETRY, "page_first", 8)
    one.hangs()
    assert kinds(bounded_call(lambda: one.store.get(KEYS, pool, range(8)))) == {"timeout"}
    blank_pages(pool, range(8), PAGE_NBYTES)  # what is done with the memory next
    one.answers()
    until(lambda: not one.store.stats()["calls_in_flight"])
    assert all(read_page(pool, page) == BLANK for page in range(8))
    assert all(one.store.get(KEYS, pool, range(8))), "the pages are still there"
    assert all(pages_equal(pool, range(8), KEYS, PAGE_NBYTES))


@pytest.mark.parametrize("after", [False, True])
def test_a_put_that_hangs_commits_nothing_and_keeps_its_slots_until_it_returns(rig, after):
    one = rig(after=after)
    one.hangs()
    keys = keys_of("late", 8)
    fill_pages(one.pool, range(8), keys, PAGE_NBYTES)
    writer = writer_of(one.store)
    assert kinds(bounded_call(lambda: one.store.put(keys, one.pool, range(8)))) == {"timeout"}
    taken = set(writer.pins.nonzero()[0].tolist())
    assert len(taken) == 8
    blank_pages(one.pool, range(8), PAGE_NBYTES)
    one.works()
    others = keys_of("others", 400)  # more than there are slots, so that any slot that is free is used
    for at in range(0, 400, 8):
        fill_pages(one.pool, range(8, 16), others[at : at + 8], PAGE_NBYTES)
        one.store.put(others[at : at + 8], one.pool, range(8, 16))
        assert not taken & set(writer.keys)
    one.answers()
    until(lambda: not one.store.stats()["calls_in_flight"])
    assert one.store.match_prefix(keys) == 0
    assert not writer.pins.any()
    fill_pages(one.pool, range(8), keys, PAGE_NBYTES)
    assert all(one.store.put(keys, one.pool, range(8)))
    assert all(one.store.get(keys, one.pool, range(8, 16)))
    assert all(pages_equal(one.pool, range(8, 16), keys, PAGE_NBYTES))


def test_pages_of_a_host_pool_are_given_to_nobody_while_an_abandoned_get_may_write_to_them(rig):
    one = rig(after=False)
    with HostPool(GEOMETRY, "page_first", 12, pinned=False) as host:
        mine = host.alloc(8, owner="request 1")
        one.hangs()
        assert kinds(bounded_call(lambda: one.store.get(KEYS, host, mine))) == {"timeout"}
        host.free(mine, owner="request 1")
        assert (host.free_pages, host.owned_pages) == (4, 8)
        assert host.alloc(5) is None
        with pytest.raises(DoubleFreeError, match="request 1"):
            host.free(mine[:1], owner="request 2")
        rest = host.alloc(4)
        one.answers()
        until(lambda: host.free_pages == 8)
        again = host.alloc(8)
        assert sorted(again.tolist()) == sorted(mine.tolist())
        assert all(one.store.get(KEYS, host, again))
        assert all(pages_equal(host, again.tolist(), KEYS, PAGE_NBYTES))
        host.free(rest)
        host.free(again)
        assert host.free_pages == 12


def test_every_call_ends_while_storage_hangs_with_the_lock(rig, monkeypatch):
    """The worst of all: what hangs holds what everybody needs."""
    monkeypatch.setattr(bounded, "_MOST_LATE", 9)
    one = rig()
    one.hangs()
    lock = one.store._core.lock
    assert lock.acquire(timeout=5)
    try:
        pool = ArrayPool(GEOMETRY, "page_first", 8)
        calls = {
            "put": lambda: one.store.put(keys_of("x", 8), pool, range(8)),
            "get": lambda: one.store.get(KEYS, pool, range(8)),
            "delete": lambda: one.store.delete(KEYS),
            "pin": lambda: one.store.pin(KEYS),
            "unpin": lambda: one.store.unpin(KEYS),
        }
        for call in calls.values():
            assert kinds(bounded_call(call)) == {"timeout"}
        with pytest.raises(DeadlineError, match="root"):
            bounded_call(one.store.clear)
        assert bounded_call(lambda: one.store.match_prefix(KEYS)) == 8
        assert bounded_call(lambda: one.store.contains(KEYS)) == [True] * 8
        assert bounded_call(lambda: one.store.touch(KEYS)) == [True] * 8
        assert bounded_call(lambda: len(one.store)) == 8
        assert bounded_call(one.store.stats)["calls_in_flight"] == 6
        bounded_call(one.store.follow)
        assert "8 pages" in bounded_call(lambda: repr(one.store))
        report = bounded_call(lambda: one.store.close(0.5))
        assert not report.clean
        assert not report.synced
        for call in calls.values():
            with pytest.raises(ClosedError):
                bounded_call(call)
    finally:
        lock.release()


def test_a_lookup_waits_only_a_moment_for_other_writers(rig, monkeypatch):
    one = rig(deadline_s=30.0)
    held = threading.Event()
    monkeypatch.setattr(one.store._core.foreign, "due", lambda: True)
    monkeypatch.setattr(one.store._core.foreign, "refresh", lambda: held.wait(20))
    assert bounded_call(lambda: one.store.match_prefix(KEYS), SOON_S) == 8
    assert bounded_call(lambda: one.store.contains(KEYS), SOON_S) == [True] * 8
    held.set()


def test_close_gives_up_within_its_bound_and_says_what_it_left(rig, caplog):
    one = rig(deadline_s=30.0)
    one.hangs()
    waiting = [
        threading.Thread(target=lambda: one.store.get(KEYS, ArrayPool(GEOMETRY, "page_first", 8), range(8)))
        for _ in range(3)
    ]
    for thread in waiting:
        thread.start()
    one.hang.gate.wait_for(3)
    report = bounded_call(lambda: one.store.close(0.5), 0.5 + SOON_S)
    assert report.abandoned_calls == 3
    assert not report.clean
    assert "did not return 3 calls" in caplog.text
    one.answers()
    for thread in waiting:
        thread.join(10)
    again = open_store(one.root, GEOMETRY, "page_first", capacity_bytes="2 MiB")
    assert again.match_prefix(KEYS) == 8, "the last call let go of the partition"
    assert again.close().clean


def test_close_ends_although_the_last_sync_hangs(rig, monkeypatch):
    one = rig()
    held = threading.Event()
    monkeypatch.setattr(writer_of(one.store), "sync_and_close", lambda: held.wait(20))
    report = bounded_call(lambda: one.store.close(0.5), 0.5 + SOON_S)
    assert not report.synced
    held.set()


def test_calls_are_refused_at_once_where_too_many_hang(rig, monkeypatch):
    monkeypatch.setattr(bounded, "_MOST_LATE", 3)
    one = rig()
    one.hangs()
    pool = ArrayPool(GEOMETRY, "page_first", 8)
    for _ in range(3):
        assert kinds(one.store.get(KEYS, pool, range(8))) == {"timeout"}
    hung = set(threading.enumerate())
    started = time.monotonic()
    assert kinds(one.store.get(KEYS, pool, range(8))) == {"timeout"}
    assert time.monotonic() - started < DEADLINE_S
    assert set(threading.enumerate()) <= hung, "a refused call takes no thread"
    one.answers()
    until(lambda: not one.store.stats()["calls_in_flight"])
    assert all(one.store.get(KEYS, pool, range(8)))


def test_an_opening_that_hangs_ends_and_closes_what_it_opens_later(tmp_path, monkeypatch):
    held, real, opened = threading.Event(), opening.open_root, []

    def slow(*arguments):
        held.wait(20)
        opened.append(real(*arguments))
        return opened[0]

    monkeypatch.setattr(opening, "open_root", slow)
    options = {"capacity_bytes": "2 MiB", "deadline_s": 0.1}
    with pytest.raises(DeadlineError, match="storage hangs"):
        bounded_call(lambda: open_store(tmp_path / "root", GEOMETRY, "page_first", **options))
    assert issubclass(DeadlineError, TimeoutError)
    held.set()
    until(lambda: opened and opened[0].closed)
    monkeypatch.undo()

    def given_back():
        with open_store(tmp_path / "root", GEOMETRY, "page_first", capacity_bytes="2 MiB") as store:
            return store.stats()["partition"].endswith("-w0/kv")

    until(given_back)


@pytest.mark.parametrize("verb", ["get", "put"])
def test_an_interrupt_leaves_a_call_as_a_deadline_does(rig, verb):
    """Ctrl-C while a call hangs: the memory is safe, and the call still counts as in flight."""
    one = rig(deadline_s=30.0)
    one.hangs()
    pool = ArrayPool(GEOMETRY, "page_first", 8)
    keys = KEYS if verb == "get" else keys_of("new", 8)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), 2)).start()
    with pytest.raises(KeyboardInterrupt):
        getattr(one.store, verb)(keys, pool, range(8))
    blank_pages(pool, range(8), PAGE_NBYTES)
    one.answers()
    until(lambda: not one.store.stats()["calls_in_flight"])
    assert all(read_page(pool, page) == BLANK for page in range(8))
    assert one.store.match_prefix(keys) == (8 if verb == "get" else 0)


def test_errors_of_a_call_are_raised_where_it_was_made(rig):
    one = rig()
    with pytest.raises(InvalidArgumentError, match="pool"):
        one.store.put(KEYS, None, range(8))
    with pytest.raises(InvalidArgumentError):
        one.store.get([object()] * 8, one.pool, range(8))
    with pytest.raises(InvalidArgumentError, match="8 keys need as many pages"):
        one.store.get(KEYS, one.pool, range(7))
    with pytest.raises(InvalidArgumentError):
        one.store.delete([3])


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "3", True])
def test_a_deadline_that_is_none_is_refused_before_anything_is_touched(tmp_path, value):
    with pytest.raises(InvalidArgumentError, match="deadline_s"):
        open_store(tmp_path / "root", GEOMETRY, "page_first", deadline_s=value)
    assert not (tmp_path / "root").exists()


def test_without_a_deadline_calls_are_made_on_the_callers_thread(tmp_path):
    threads = []
    hang = Hang(lambda call: threads.append(threading.current_thread()))
    engine = FaultyEngine(PosixEngine(direct=False, threads=1), hang)
    options = {"capacity_bytes": "2 MiB", "engine": engine}
    pool = ArrayPool(GEOMETRY, "page_first", 1)
    for deadline_s, here in ((None, True), (5.0, False)):
        with open_store(tmp_path / "root", GEOMETRY, "page_first", deadline_s=deadline_s, **options) as store:
            assert all(store.put(keys_of(str(here), 1), pool, [0]))
            assert (threads[-1] is threading.current_thread()) == here
    engine.close()


def test_no_thread_to_be_had_is_no_reason_to_refuse(rig, monkeypatch, caplog):
    one = rig()
    one.store._lane.close()
    until(lambda: not one.store._lane._threads)
    one.store._lane._closed = False

    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert all(one.store.get(KEYS, one.pool, range(8, 16)))
    assert caplog.text.count("calls have no deadline") == 1


def test_nothing_is_inherited_that_could_block():
    public = {name for name in vars(PageStore) if name[0] != "_"} | {"__len__", "__repr__"}
    assert public - vars(BoundedStore).keys() == set()
    assert len(public) > 12


def test_closed_stores_leave_no_thread(tmp_path):
    before = set(threading.enumerate())
    for _ in range(5):
        with open_store(tmp_path / "root", GEOMETRY, "page_first", capacity_bytes="2 MiB") as store:
            store.match_prefix(KEYS)
            store.delete(KEYS)
    assert set(threading.enumerate()) <= before


ENDS = """
import os, sys, threading
from hicache_tier.testing.array_pool import ArrayPool, keys_of
from hicache_tier.testing.store_rig import GEOMETRY
from hicache_tier_storage import open_store, posix

here = threading.Event()


def hang(*arguments):  # in the kernel, as far as anybody can tell
    if threading.current_thread().name.startswith(sys.argv[2]):
        here.set()
        threading.Event().wait()
    here.wait()
    return write(*arguments)


store = open_store(sys.argv[1], GEOMETRY, "page_first", capacity_bytes="2 MiB", threads=3, deadline_s=0.3)
write, posix.PWRITEV = posix.PWRITEV, hang
posix.PREADV = hang
keys = keys_of("ends", 64)
print(store.put(keys, ArrayPool(GEOMETRY, "page_first", 64), range(64))[0].kind)
print(store.close(0.3).abandoned_calls)
"""


@pytest.mark.parametrize("thread", ["hct-store", "hct-io"])
def test_a_process_ends_although_one_of_its_threads_hangs(tmp_path, thread):
    run = subprocess.run(
        [sys.executable, "-c", ENDS, tmp_path / "root", thread], capture_output=True, text=True, timeout=60
    )
    assert run.stdout.split() == ["timeout", "1"], run.stderr
    assert run.returncode == 0
    with open_store(tmp_path / "root", GEOMETRY, "page_first", capacity_bytes="2 MiB") as store:
        assert store.match_prefix(keys_of("ends", 1)) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_fork_is_refused_at_once(rig):
    one = rig()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            one.store.get(KEYS, one.pool, range(8))
        except ClosedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert all(one.store.get(KEYS, one.pool, range(8, 16)))
