"""The engine `kvikio`: with the real package where there is one, and everywhere with a stand-in for it.

The stand-in has the calls that the engine uses, over plain files. It shows what the engine does with handles,
futures and verdicts; what kvikio does, only the real package shows.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache_tier.testing.array_pool import ArrayPool, fill_pages, keys_of, pages_equal
from hicache_tier.testing.device_engines import stand_in_for_kvikio
from hicache_tier.testing.device_rig import ALIGNED
from hicache_tier.testing.engine import Bench, ByteEngineSuite, Memory
from hicache_tier.testing.store import PageStoreSuite
from hicache_tier_storage import kept_handles, kvikio_engine, open_store
from hicache_tier_storage.engine import STILL_UNDER_WAY
from hicache_tier_storage.kvikio_engine import KvikioEngine
from hicache_tier_storage.kvikio_package import why_no_kvikio

needs_kvikio = [pytest.mark.gds, pytest.mark.skipif(bool(why_no_kvikio()), reason=why_no_kvikio())]


class Future:
    def __init__(self, future):
        self._future = future

    def done(self):
        return self._future.done()

    def get(self):
        return self._future.result()


class CuFile:
    pool = ThreadPoolExecutor(2)
    opened = 0

    def __init__(self, path, flags):
        self._fd = os.open(path, {"r": os.O_RDONLY, "r+": os.O_RDWR}[flags])
        type(self).opened += 1

    def fileno(self):
        return self._fd

    def pread(self, view, file_offset):
        return Future(self.pool.submit(os.preadv, self._fd, [view], file_offset))

    def pwrite(self, view, file_offset):
        return Future(self.pool.submit(os.pwritev, self._fd, [view], file_offset))

    def close(self):
        os.close(self._fd)


@pytest.fixture
def stand_in(monkeypatch):
    stand_in_for_kvikio(monkeypatch, CuFile, "AUTO")


class Engine(ByteEngineSuite):
    def make_engine(self, directory):
        return KvikioEngine(direct=False, threads=2, min_piece_nbytes=1)


@pytest.mark.usefixtures("stand_in")
class TestStandIn(Engine):
    pass


class TestReal(Engine):
    pytestmark = needs_kvikio


class Store(PageStoreSuite):
    @pytest.fixture
    def shared_engine(self):
        self.engine = KvikioEngine(direct=False, threads=2, min_piece_nbytes=1)
        yield
        self.engine.close()

    def open_store(self, root):
        room = 256 * max(8192, self.geometry.page_nbytes)
        return open_store(root, self.geometry, self.layout, capacity_bytes=room, engine=self.engine)


@pytest.mark.usefixtures("stand_in", "shared_engine")
class TestStoreOnStandIn(Store):
    pass


@pytest.mark.usefixtures("shared_engine")
class TestStoreOnReal(Store):
    pytestmark = needs_kvikio


@pytest.fixture
def engine(stand_in):
    engine = KvikioEngine(direct=False, threads=2, deadline_s=0.2, min_piece_nbytes=1)
    yield engine
    engine.close()


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path, [4096])
    yield bench
    bench.close()


def filled(pages):
    memory = Memory([4096], pages, between=0)
    memory.fill()
    return memory


def test_handles_stay_open_and_go_with_their_file(engine, bench):
    slabs = [bench.slab(f"slab{number}") for number in range(3)]
    before = CuFile.opened
    for _ in range(4):
        assert not any(engine.write(bench.batch(filled(3), [(slab, 0) for slab in slabs])))
    assert CuFile.opened - before == 3
    held = {os.fstat(number).st_ino for number in engine._handles[True].numbers()}
    assert len(held) == 3
    slabs[1].path.unlink()
    assert not any(engine.write(bench.batch(filled(1), [(slabs[0], 0)])))
    assert len(engine._handles[True]) == 2


def test_descriptors_are_bounded(engine, bench):
    for number in range(40):
        assert not any(engine.write(bench.batch(filled(1), [(bench.slab(f"slab{number}"), 0)])))
    assert len(engine._handles[True]) <= kept_handles.MOST + 1
    before = len(list(Path("/proc/self/fd").iterdir()))
    engine.close()
    assert len(list(Path("/proc/self/fd").iterdir())) < before


@pytest.mark.parametrize("merged", [1, 2])
@pytest.mark.parametrize("fault", ["short", "raises", "refused"])
@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_transfer_that_fails_is_repeated_for_its_pages(engine, bench, monkeypatch, fault, verb, merged):
    monkeypatch.setattr(kvikio_engine, "_TASK_NBYTES", merged * 4096)
    slab = bench.slab()
    places = [(slab, slot) for slot in range(4)]
    memory = filled(4)
    assert not any(engine.write(bench.batch(memory, places)))
    name = "pread" if verb == "read" else "pwrite"
    real = getattr(CuFile, name)

    def faulty(self, view, file_offset):
        if file_offset != 2 * 4096:
            return real(self, view, file_offset=file_offset)
        if fault == "refused":
            raise RuntimeError("KvikIO failure")
        if fault == "raises":
            return Future(self.pool.submit(lambda: 1 / 0))
        return real(self, view[:100], file_offset=file_offset)

    monkeypatch.setattr(CuFile, name, faulty)
    target = filled(4) if verb == "write" else Memory([4096], 4, between=0)
    batch = bench.batch(target, places)
    hooked = []
    batch.hook = lambda first, last: hooked.extend(range(first, last))
    assert not any(getattr(engine, verb)(batch))
    assert engine.retried_pages == merged
    assert sorted(hooked) == [0, 1, 2, 3]
    assert [bench.on_disk(slab, slot) for slot in range(4)] == [target.page(slot) for slot in range(4)]


def test_futures_that_never_end(engine, bench, monkeypatch):
    slab = bench.slab()
    never = SimpleNamespace(done=lambda: False)
    with monkeypatch.context() as patch:
        patch.setattr(CuFile, "pwrite", lambda *_, **__: never)
        start = time.monotonic()
        reasons = engine.write(bench.batch(filled(2), [(slab, 0), (slab, 1)]))
        assert time.monotonic() - start < 5
    assert [reason.partition(":")[0] for reason in reasons] == ["timeout"] * 2
    assert not any(engine.write(bench.batch(filled(2), [(slab, 0), (slab, 1)])))


class Asked:
    """A call that is made when it has been asked for often enough; one who asks is told an error before."""

    under_way = 0

    def __init__(self, call, error, asks=4):
        self._call, self._error, self._left = call, error, asks
        type(self).under_way += 1

    def done(self):
        if self._call is None:
            return True
        self._left -= 1
        if self._left == 1:
            raise self._error
        if self._left <= 0:
            self._moved, self._call = self._call(), None
            type(self).under_way -= 1
        return self._call is None

    def get(self):
        return self._moved


def asked_for(patch, verb, error, interrupted_at=None):
    """Let calls of CuFile end only as they are asked for; one is interrupted as it is made."""
    system = os.pwritev if verb == "write" else os.preadv
    made = []

    def submit(self, view, file_offset):
        made.append(file_offset)
        if len(made) == interrupted_at:
            raise KeyboardInterrupt
        return Asked(lambda: system(self._fd, [view], file_offset), error)

    patch.setattr(CuFile, "pwrite" if verb == "write" else "pread", submit)
    patch.setattr(kvikio_engine, "_TASK_NBYTES", 4096)
    patch.setattr(Asked, "under_way", 0)
    return made


def notes(caught):
    return getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_future_that_does_not_tell_is_asked_again(engine, bench, monkeypatch, verb):
    slab, memory = bench.slab(), filled(4)
    assert not any(engine.write(bench.batch(memory, [(slab, at) for at in range(4)])))
    target = filled(4) if verb == "write" else Memory([4096], 4, between=0)
    with monkeypatch.context() as patch:
        asked_for(patch, verb, RuntimeError("boom"))
        assert not any(getattr(engine, verb)(bench.batch(target, [(slab, at) for at in range(4)])))
    assert [bench.on_disk(slab, at) for at in range(4)] == [target.page(at) for at in range(4)]


def test_futures_that_never_tell(engine, bench, monkeypatch):
    monkeypatch.setattr(CuFile, "pwrite", lambda *_, **__: SimpleNamespace(done=lambda: 1 / 0))
    reasons = engine.write(bench.batch(filled(2), [(bench.slab(), 0), (bench.slab(), 1)]))
    assert [reason.partition(":")[0] for reason in reasons] == ["timeout"] * 2


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("interrupted_at", [None, 3], ids=["waiting", "beginning"])
def test_an_interrupt_waits_for_what_is_under_way(engine, bench, monkeypatch, verb, interrupted_at):
    """Through further interrupts; a call that was made as it came may be under way all the same."""
    slab = bench.slab()
    batch = bench.batch(filled(4), [(slab, at) for at in range(4)])
    with monkeypatch.context() as patch:
        made = asked_for(patch, verb, KeyboardInterrupt(), interrupted_at)
        with pytest.raises(KeyboardInterrupt) as caught:
            getattr(engine, verb)(batch)
        assert len(made) == (interrupted_at or 4)
        assert Asked.under_way == 0
    assert notes(caught) == ([STILL_UNDER_WAY] if interrupted_at else [])
    assert not any(engine.write(batch))


def test_an_interrupt_does_not_wait_for_ever(engine, bench, monkeypatch):
    def asked():
        if asks.append(1) or len(asks) == 2:
            raise KeyboardInterrupt
        return False

    asks = []
    monkeypatch.setattr(CuFile, "pwrite", lambda *_, **__: SimpleNamespace(done=asked))
    with pytest.raises(KeyboardInterrupt) as caught:
        engine.write(bench.batch(filled(1), [(bench.slab(), 0)]))
    assert notes(caught) == [STILL_UNDER_WAY]


def test_what_was_begun_before_an_error_is_waited_for(engine, bench, monkeypatch):
    slabs = [bench.slab(), bench.slab()]
    real = kvikio_engine.describe
    places = [(slabs[0], 0), (slabs[1], 0), (slabs[0], 1)]
    batch, turns = bench.batch(filled(3), places), []

    def describe(*arguments):
        if turns.append(1) or len(turns) == 2:
            raise MemoryError
        return real(*arguments)

    verdicts = kvikio_engine.good_runs

    def one_by_one(given, first, last):
        for start, stop in verdicts(given, first, last):
            yield from ((at, at + 1) for at in range(start, stop))

    asked_for(monkeypatch, "write", RuntimeError("boom"))
    monkeypatch.setattr(kvikio_engine, "good_runs", one_by_one)
    monkeypatch.setattr(kvikio_engine, "describe", describe)
    assert engine.write(batch) == ["", "engine_error: MemoryError: ", "engine_error: MemoryError: "]
    assert Asked.under_way == 0


def test_a_put_that_was_interrupted_writes_to_no_other_pages_slot(stand_in, memory_path, monkeypatch):
    """The first piece, whose future nobody has, is written late."""
    nbytes, late, real = ALIGNED.page_nbytes, [], CuFile.pwrite
    monkeypatch.setattr(kvikio_engine, "_TASK_NBYTES", nbytes)
    engine = KvikioEngine(direct=False, threads=2)
    host, old, new = ArrayPool(ALIGNED, "page_first", 16), keys_of("old", 4), keys_of("new", 4)
    fill_pages(host, range(8), old + new, nbytes)

    def interrupted(self, view, file_offset):
        late.append(lambda: real(self, view, file_offset).get())
        raise KeyboardInterrupt

    options = {"capacity_bytes": "4 MiB", "engine": engine, "deadline_s": None}
    with open_store(memory_path, ALIGNED, "page_first", **options) as store:
        with monkeypatch.context() as patch:
            patch.setattr(CuFile, "pwrite", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.put(old, host, range(4))
        assert store.stats()["stranded_slots"] == 4
        assert all(store.put(new, host, range(4, 8)))
        late[0]()
        assert all(store.get(new, host, range(8, 12)))
    assert all(pages_equal(host, range(8, 12), new, nbytes))
    engine.close()


def test_a_child_of_fork_is_refused(engine, bench, monkeypatch):
    slab = bench.slab()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert all("another process" in why for why in engine.write(bench.batch(filled(1), [(slab, 0)])))
