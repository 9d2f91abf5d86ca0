"""One drive of three hangs: its pages are timeouts by the deadline, those of the others are what they are."""

from __future__ import annotations

import threading
import time

import pytest

from hicache_tier import HostPool
from hicache_tier.errors import InvalidArgumentError, NotAStoreError
from hicache_tier.testing.array_pool import (
    ArrayPool,
    blank_pages,
    fill_pages,
    keys_of,
    pages_equal,
    read_page,
)
from hicache_tier.testing.device_rig import ALIGNED, BytePool
from hicache_tier.testing.faults import FaultyEngine, Hang
from hicache_tier.testing.store_rig import GEOMETRY
from hicache_tier_storage import bounded, open_store, opening, placement, staging
from hicache_tier_storage.bounded import DeadlineError
from hicache_tier_storage.bounded_roots import BoundedRoots
from hicache_tier_storage.posix import PosixEngine
from hicache_tier_storage.roots import SeveralRoots

DEADLINE_S, PATIENCE_S, SOON_S = 0.3, 60.0, 5.0
KEYS = keys_of("drives", 48)
ROWS = range(len(KEYS))


class Rig:
    """A store over three roots of which one can hang, with pages on all of them."""

    def __init__(self, path, geometry=GEOMETRY, pool=ArrayPool):
        self.bad = path / "bad"
        self.hang = Hang(lambda call: call.batch.files[0].path.is_relative_to(self.bad))
        self.hang.on = False
        self.engine = FaultyEngine(PosixEngine(direct=False, threads=2), self.hang)
        self.roots = [path / "one", self.bad, path / "three"]
        options = {"capacity_bytes": "24 MiB", "engine": self.engine, "deadline_s": PATIENCE_S}
        self.store = open_store(self.roots, geometry, "page_first", **options)
        self.nbytes = geometry.page_nbytes
        self.pool = pool(geometry, "page_first", 2 * len(KEYS))
        fill_pages(self.pool, ROWS, KEYS, self.nbytes)
        assert all(self.store.put(KEYS, self.pool, ROWS))
        self.lost = [key in self.store.stores[self.bad]._core.index for key in KEYS]
        assert 5 < sum(self.lost) < 43

    def deadline(self, seconds):
        """Set that of the root which can hang; the others may take as long as a busy machine takes."""
        self.store.stores[self.bad].deadline_s = seconds

    def hangs(self):
        self.hang.on = True
        self.deadline(DEADLINE_S)

    def answers(self):
        self.hang.on = False
        self.hang.gate.open()
        self.deadline(PATIENCE_S)
        end = time.monotonic() + 60
        while self.store.stats()["calls_in_flight"]:
            assert time.monotonic() < end
            time.sleep(0.01)

    def close(self):
        self.hang.gate.open()
        self.store.close()
        self.engine.close()

    def expected(self, good):
        return ["timeout" if lost else good for lost in self.lost]


@pytest.fixture
def rig(memory_path):
    rigs = []

    def make(*arguments):
        rigs.append(Rig(memory_path, *arguments))
        return rigs[-1]

    yield make
    for one in rigs:
        one.close()


def soon(call):
    started = time.monotonic()
    answer = call()
    assert time.monotonic() - started < DEADLINE_S + SOON_S
    return answer


def kinds(status):
    return [verdict.kind for verdict in status]


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_get_has_the_pages_of_the_others(rig, kind, monkeypatch):
    monkeypatch.setattr(staging, "_RINGS_OF_PROCESS", staging._Rings())
    one = rig(*((ALIGNED, BytePool) if kind == "device" else ()))
    there = range(len(KEYS), 2 * len(KEYS))
    blank_pages(one.pool, there, one.nbytes)
    one.hangs()
    for _ in range(bounded._MOST_LATE + 2):  # more than there are rings
        assert kinds(soon(lambda: one.store.get(KEYS, one.pool, there))) == one.expected("loaded")
        assert pages_equal(one.pool, there, KEYS, one.nbytes) == [not lost for lost in one.lost]
    one.answers()
    assert pages_equal(one.pool, there, KEYS, one.nbytes) == [not lost for lost in one.lost]
    assert kinds(one.store.get(KEYS, one.pool, there)) == ["loaded"] * len(KEYS)
    assert all(pages_equal(one.pool, there, KEYS, one.nbytes))


def test_a_put_stores_the_pages_of_the_others(rig):
    one = rig()
    keys = keys_of("new", 48)
    homes = [one.store._placement.home(key) for key in keys]
    fill_pages(one.pool, ROWS, keys, one.nbytes)
    one.hangs()
    status = soon(lambda: one.store.put(keys, one.pool, ROWS, parents=[None, *keys[:-1]]))
    assert kinds(status) == ["timeout" if home == 1 else "stored" for home in homes]
    blank_pages(one.pool, ROWS, one.nbytes)  # what is done with the memory next
    assert one.store.contains(keys) == [home != 1 for home in homes]
    one.answers()
    assert one.store.contains(keys) == [home != 1 for home in homes]
    fill_pages(one.pool, ROWS, keys, one.nbytes)
    assert set(kinds(one.store.put(keys, one.pool, ROWS))) == {"stored", "already_stored"}
    assert all(one.store.get(keys, one.pool, ROWS))
    assert all(pages_equal(one.pool, ROWS, keys, one.nbytes))


def test_a_host_pool_keeps_back_the_pages_of_the_hung_root_alone(rig):
    one = rig()
    with HostPool(GEOMETRY, "page_first", len(KEYS), pinned=False) as host:
        mine = host.alloc(len(KEYS))
        one.hangs()
        assert kinds(soon(lambda: one.store.get(KEYS, host, mine))) == one.expected("loaded")
        host.free(mine)
        assert host.free_pages == one.lost.count(False)
        one.answers()
        end = time.monotonic() + 60
        while host.free_pages < len(KEYS):
            assert time.monotonic() < end
            time.sleep(0.01)


def test_all_other_calls_while_a_root_hangs_with_its_lock(rig):
    one = rig()
    one.deadline(DEADLINE_S)
    lock = one.store.stores[one.bad]._core.lock
    assert lock.acquire(timeout=5)
    try:
        assert soon(lambda: one.store.match_prefix(KEYS)) == len(KEYS)
        assert soon(lambda: one.store.contains([*KEYS, b"no"])) == [True] * len(KEYS) + [False]
        assert all(soon(lambda: one.store.touch(KEYS)))
        assert soon(lambda: len(one.store)) == len(KEYS)
        assert kinds(soon(lambda: one.store.pin(KEYS))) == one.expected("pinned")
        assert kinds(soon(lambda: one.store.unpin(KEYS))) == one.expected("unpinned")
        assert kinds(soon(lambda: one.store.delete(KEYS[:24]))) == one.expected("deleted")[:24]
        with pytest.raises(DeadlineError, match="bad"):
            soon(one.store.clear)
        assert one.store.contains(KEYS) == one.lost, "the others were cleared"
        in_flight = {row["root"]: row["calls_in_flight"] for row in soon(one.store.stats)["roots"]}
        assert in_flight == {str(root): 4 * (root == one.bad) for root in one.roots}
        report = soon(lambda: one.store.close(0.5))
        assert not report.clean
    finally:
        lock.release()


def test_a_root_that_is_known_to_hang_costs_no_more_time(rig, monkeypatch):
    monkeypatch.setattr(bounded, "_MOST_LATE", 1)
    one = rig()
    one.hangs()
    assert kinds(soon(lambda: one.store.get(KEYS, one.pool, ROWS))) == one.expected("loaded")
    one.deadline(PATIENCE_S)
    started = time.monotonic()
    assert kinds(one.store.get(KEYS, one.pool, ROWS)) == one.expected("loaded")
    assert time.monotonic() - started < PATIENCE_S / 2
    assert one.store.stats()["calls_in_flight"] == 1
    one.answers()
    assert all(one.store.get(KEYS, one.pool, ROWS))


def test_an_interrupt_leaves_every_roots_part(rig, monkeypatch):
    one = rig()
    there = range(len(KEYS), 2 * len(KEYS))
    blank_pages(one.pool, there, one.nbytes)
    one.hang._when = lambda call: True
    one.hang.on = True

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("hicache_tier_storage.calls.Call.wait", interrupted)
        one.store.get(KEYS, one.pool, there)
    one.answers()
    assert all(read_page(one.pool, page) == b"\xa5" * one.nbytes for page in there)


def test_wrong_arguments_touch_nothing(rig):
    one = rig()
    for call in (
        lambda: one.store.get(KEYS, one.pool, [0] * len(KEYS)),
        lambda: one.store.put(KEYS, one.pool, ROWS, parents=[None]),
        lambda: one.store.put(KEYS, None, ROWS),
        lambda: one.store.put(KEYS, one.pool, ["a"] * len(KEYS)),
        lambda: one.store.delete([3]),
    ):
        with pytest.raises(InvalidArgumentError):
            call()
    assert one.hang.struck == 0
    assert one.store.capacity_nbytes == 24 << 20


def test_nothing_is_inherited_that_could_block(rig):
    """What is not overridden calls the roots one by one, each of which is bounded."""
    one = rig()
    assert isinstance(one.store, BoundedRoots)
    assert type(one.store.on_this_thread) is SeveralRoots
    assert {type(root) for root in one.store.stores.values()} == {bounded.BoundedStore}
    inherited = {name for name in vars(SeveralRoots) if name[0] != "_"} - vars(BoundedRoots).keys()
    lookups = {"match_prefix", "contains", "follow", "due", "touch", "capacity_nbytes", "closed"}
    assert inherited == lookups | {"stats", "delete", "pin", "unpin", "end_threads"}


class Opened:
    """Roots that open in time but for one, and what it opens in the end."""

    def __init__(self, path, monkeypatch):
        self.roots = [path / "one", path / "bad", path / "three"]
        self.go, self.late = threading.Event(), []
        self._patch = monkeypatch

    def hangs(self, where, name):
        real = getattr(where, name)

        def slow(path, *arguments):
            if path != self.roots[1]:
                return real(path, *arguments)
            self.go.wait(PATIENCE_S)
            self.late.append(real(path, *arguments))
            return self.late[0]

        self._patch.setattr(where, name, slow)

    def open(self, roots=None, deadline_s=1.0):
        options = {"capacity_bytes": "24 MiB", "io_mode": "buffered", "deadline_s": deadline_s}
        return open_store(roots or self.roots, GEOMETRY, "page_first", **options)


@pytest.fixture
def opened(memory_path, monkeypatch):
    one = Opened(memory_path, monkeypatch)
    yield one
    one.go.set()


def until(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("step", ["look", "open"])
def test_a_root_that_hangs_when_it_is_opened_is_left_out(opened, step, monkeypatch):
    if step == "look":
        opened.hangs(placement.Look, "at")
    else:
        opened.hangs(opening, "open_root")
    pool = ArrayPool(GEOMETRY, "page_first", len(KEYS))
    fill_pages(pool, ROWS, KEYS, GEOMETRY.page_nbytes)
    with opened.open() as store:
        assert list(store.stores) == [opened.roots[0], opened.roots[2]]
        (row,) = [row for row in store.stats()["roots"] if "left_out" in row]
        assert row["root"] == str(opened.roots[1])
        assert "storage hangs" in row["left_out"]
        assert store.capacity_nbytes <= 16 << 20, "its share is not given to the others"
        assert kinds(store.put(KEYS, pool, ROWS)) == ["stored"] * len(KEYS)
        assert kinds(store.get(KEYS, pool, ROWS)) == ["loaded"] * len(KEYS)
        opened.go.set()
        until(lambda: opened.late)
        if step == "open":
            until(lambda: opened.late[0].closed)
    monkeypatch.undo()
    with opened.open() as store:
        assert all(one.stats()["partition"].endswith("-w0/kv") for one in store.stores.values())


def test_where_all_roots_hang_there_is_no_store(opened):
    opened.hangs(opening, "open_root")
    with pytest.raises(DeadlineError, match="bad was not opened within 3 s: storage hangs"):
        opened.open(opened.roots[1:2])


def test_a_root_that_must_be_refused_leaves_the_others_closed(opened):
    """Whichever order they are opened in."""
    opened.roots[0].mkdir()
    (opened.roots[0] / "thesis.txt").write_text("x")
    with pytest.raises(NotAStoreError, match="one"):
        opened.open()
    with opened.open(opened.roots[1:]) as store:
        assert all(one.stats()["partition"].endswith("-w0/kv") for one in store.stores.values())


def test_a_refusal_is_told_while_another_root_hangs(opened):
    """And what hangs is closed once it is opened."""
    refused = opened.roots[2]
    refused.mkdir()
    (refused / "thesis.txt").write_text("x")
    opened.hangs(opening, "open_root")
    started = time.monotonic()
    with pytest.raises(NotAStoreError, match="three"):
        opened.open(deadline_s=PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S
    assert not opened.late
    opened.go.set()
    until(lambda: opened.late and opened.late[0].closed)
    with opened.open(opened.roots[:1]) as store:
        assert store.stats()["partition"].endswith("-w0/kv")


def test_roots_keep_their_order_however_long_they_take(opened, monkeypatch):
    """A page's home follows from it."""
    real = opening.open_root

    def last_first(path, *arguments):
        if path != opened.roots[2]:
            opened.go.wait(PATIENCE_S)
        store = real(path, *arguments)
        opened.go.set()
        return store

    monkeypatch.setattr(opening, "open_root", last_first)
    with opened.open(deadline_s=PATIENCE_S) as store:
        assert list(store.stores) == opened.roots
        assert store.roots == tuple(opened.roots)
