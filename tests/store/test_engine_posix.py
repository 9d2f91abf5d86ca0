"""The engine `posix` in every mode passes the suite that ships."""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading

import numpy as np
import pytest

from hicache_tier.testing.engine import Bench, ByteEngineSuite, Memory
from hicache_tier_storage import PageBatch, posix, vectors
from hicache_tier_storage.posix import PosixEngine
from hicache_tier_storage.probe import probe_posix
from hicache_tier_storage.slab import FileCache, SlabShape, StoreFile


class TestBufferedOneThread(ByteEngineSuite):
    def make_engine(self, directory):
        return PosixEngine(direct=False, threads=1)


class TestBufferedFourThreads(ByteEngineSuite):
    def make_engine(self, directory):
        return PosixEngine(direct=False, threads=4)


class TestBufferedInPieces(ByteEngineSuite):
    def make_engine(self, directory):
        return PosixEngine(direct=False, threads=2, write_nbytes=1000)


class TestDirectOneThread(ByteEngineSuite):
    def make_engine(self, directory):
        return direct(directory, 1)


class TestDirectFourThreads(ByteEngineSuite):
    def make_engine(self, directory):
        return direct(directory, 4)


def direct(directory, threads):
    row = next(row for row in probe_posix(directory) if row.mode == "direct")
    if not row.usable:
        pytest.skip(f"O_DIRECT does not work here: {row.reason}")
    return PosixEngine(direct=True, threads=threads)


@pytest.fixture
def engine():
    engine = PosixEngine(direct=False, threads=2)
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


@pytest.mark.parametrize("verb", ["write", "read"])
def test_one_page_that_fails_alone_within_a_run(engine, bench, monkeypatch, verb):
    """An I/O error at one offset fails that page, the others of its run go through."""
    slab = bench.slab()
    memory = filled(8)
    batch = bench.batch(memory, [(slab, slot) for slot in range(8)])
    assert not any(engine.write(batch))
    real = posix.vector_io

    def broken(fd, iov, offset, *, write):
        return errno.EIO if offset == 3 * 4096 else real(fd, iov, offset, write=write)

    monkeypatch.setattr(posix, "vector_io", broken)
    monkeypatch.setattr(posix, "PWRITEV", lambda *_: -1)  # the call for all of them
    monkeypatch.setattr(posix, "PREADV", lambda *_: -1)
    reasons = getattr(engine, verb)(batch)
    assert [at for at, reason in enumerate(reasons) if reason] == [3]
    assert reasons[3].startswith("io_error")


def test_short_transfers_are_finished(engine, bench, monkeypatch):
    """The kernel may move less than it was asked for."""
    slab = bench.slab()
    memory = filled(4)
    places = [(slab, slot) for slot in range(4)]

    def stingy(call):
        # One byte more than a third of a page at a time, whatever is asked for.
        def move(fd, iov, count, offset):
            first = (ctypes.c_uint64 * 2).from_address(iov)
            part = (ctypes.c_uint64 * 2)(first[0], min(first[1], 1366))
            return call(fd, ctypes.addressof(part), 1, offset)

        return move

    for module in (posix, vectors):
        monkeypatch.setattr(module, "PWRITEV", stingy(vectors.PWRITEV))
        monkeypatch.setattr(module, "PREADV", stingy(vectors.PREADV))
    assert not any(engine.write(bench.batch(memory, places)))
    assert [bench.on_disk(slab, slot) for slot in range(4)] == [memory.page(page) for page in range(4)]
    target = Memory([4096], 4, between=0)
    assert not any(engine.read(bench.batch(target, places)))
    assert [target.page(page) for page in range(4)] == [memory.page(page) for page in range(4)]


def test_one_page_above_2_gib_is_read_to_its_end(engine, memory_path, monkeypatch):
    """The kernel moves 2 GiB less 4 KiB at a time, and says so. The file is a hole but for its last bytes."""
    block, blocks = 256 << 20, 9  # every segment is the same memory, so that the page costs 256 MiB
    shape = SlabShape(block * blocks, block * blocks, 1)
    path = memory_path / "slab"
    with path.open("wb") as file:
        file.truncate(shape.data_nbytes)
        file.seek(shape.data_nbytes - 4)
        file.write(b"last" + shape.tail())
    cache = FileCache(4)
    memory = mmap.mmap(-1, block)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    batch = PageBatch(
        [StoreFile(path, shape.file_nbytes, cache, writable=False)],
        np.zeros(1, np.int64),
        np.full((1, blocks), address, np.uint64),
        np.full(blocks, block, np.uint64),
        shape.page_nbytes,
        shape.stride,
    )
    moved, real = [], vectors.PREADV

    def counted(*arguments):
        moved.append(real(*arguments))
        return moved[-1]

    monkeypatch.setattr(posix, "PREADV", counted)
    monkeypatch.setattr(vectors, "PREADV", counted)
    assert engine.read(batch) == [""]
    assert max(moved) < 1 << 31 < shape.page_nbytes
    assert memory[-4:] == b"last"
    cache.close()


def test_calls_are_few_and_leave_the_interpreter_to_others(engine, tmp_path, monkeypatch):
    """What a Python thread that spins beside the store can cost is bounded by how often it is asked."""
    for call in (vectors.PWRITEV, vectors.PREADV):
        assert not call._flags_ & ctypes._FUNCFLAG_PYTHONAPI, "the call keeps the GIL"
    bench = Bench(tmp_path, [512] * 8, slots=512)
    slab = bench.slab()
    memory = Memory([512] * 8, 512, between=64)
    memory.fill()
    batch = bench.batch(memory, [(slab, slot) for slot in range(512)])
    calls = []
    for name in ("PWRITEV", "PREADV"):
        real = getattr(vectors, name)
        monkeypatch.setattr(posix, name, lambda *a, real=real: calls.append(1) or real(*a))
        monkeypatch.setattr(vectors, name, lambda *a, real=real: calls.append(1) or real(*a))
    assert not any(engine.write(batch))
    assert not any(engine.read(batch))
    assert len(calls) <= 2 * 8, "2 MiB in 4096 pieces, both ways"
    bench.close()


def test_interrupted_calls_go_on(engine, bench, monkeypatch):
    slab = bench.slab()
    memory = filled(1)
    turns = iter(range(100))
    real = vectors.PWRITEV

    def interrupted(fd, iov, count, offset):
        if next(turns) % 2 == 0:
            ctypes.set_errno(errno.EINTR)
            return -1
        return real(fd, iov, count, offset)

    for module in (posix, vectors):
        monkeypatch.setattr(module, "PWRITEV", interrupted)
    assert engine.write(bench.batch(memory, [(slab, 0)])) == [""]
    assert bench.on_disk(slab, 0) == memory.page(0)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errno.ENOSPC, "disk_full"),
        (errno.EDQUOT, "disk_full"),
        (errno.EACCES, "access_denied"),
        (errno.EROFS, "read_only"),
        (errno.EIO, "io_error"),
    ],
)
def test_errors_have_a_short_name(engine, bench, monkeypatch, error, reason):
    slab = bench.slab()
    monkeypatch.setattr(posix, "PWRITEV", lambda *_: -1)
    monkeypatch.setattr(posix, "vector_io", lambda *_, **__: error)
    (got,) = engine.write(bench.batch(filled(1), [(slab, 0)]))
    assert got.partition(":")[0] == reason


def test_no_page_is_moved_any_more_once_a_call_has_raised(bench):
    """A hook must not raise; if it does, the memory is left alone once the call is over."""
    engine = PosixEngine(direct=False, threads=4)
    slab = bench.slab()
    memory = filled(16)
    batch = bench.batch(memory, [(slab, slot) for slot in range(0, 16, 2)] + [(slab, 15)] * 8)
    running = threading.Semaphore(0)
    live = set()

    def hook(first, last):
        live.add(threading.get_ident())
        running.release()
        if threading.current_thread() is threading.main_thread():
            raise RuntimeError("a faulty hook")
        threading.Event().wait(0.05)
        live.discard(threading.get_ident())

    batch.hook = hook
    with pytest.raises(RuntimeError, match="faulty hook"):
        for _ in range(50):  # until the main thread got a run of its own
            engine.write(batch)
    assert not live - {threading.get_ident()}
    engine.close()


@pytest.mark.parametrize("segments", [[4096], [600, 8, 600, 2888], [64] * 64])
def test_calls_that_write_are_no_larger_than_asked_for(tmp_path, monkeypatch, segments):
    real, asked = vectors.PWRITEV, []

    def recorded(fd, pointer, count, offset):
        moved = real(fd, pointer, count, offset)
        asked.append(moved)
        return moved

    monkeypatch.setattr(vectors, "PWRITEV", recorded)
    bench = Bench(tmp_path, segments)
    engine = PosixEngine(direct=False, threads=1, write_nbytes=1000)
    memory = Memory(segments, 8, between=0)
    memory.fill()
    slab = bench.slab()
    assert not any(engine.write(bench.batch(memory, [(slab, slot) for slot in range(8)])))
    assert max(asked) <= 1000
    assert sum(asked) == 8 * sum(segments)
    bench.close()
