"""Conformance suite for byte engines: subclass `ByteEngineSuite` and say how to make an engine.

Pytest does the rest::

    class TestMine(ByteEngineSuite):
        def make_engine(self, directory):
            return MyEngine(directory)
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hicache_tier_storage.engine import ByteEngine, PageBatch
from hicache_tier_storage.slab import SLOT_ALIGNMENT, FileCache, SlabShape, StoreFile, create_slab

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from hicache_tier_storage.engine import DeviceMemory

_TIMEOUT_S = 30.0
# Lengths of a page's segments, and bytes between one segment and the next in memory.
PAGES = {
    "one_run": ([8192], 0),
    "one_run_with_gap": ([6144], 0),
    "one_byte": ([1], 3),
    "odd_run": ([4097], 1),
    "sectors": ([512] * 6, 512),
    "halves": ([2048, 4096, 2048], 4096),
    "odd_pieces": ([132, 576, 656, 7, 1], 5),
    "k_then_v": ([3072, 2048], 64),
    "many_pieces": ([24] * 1030, 8),
    "many_sectors": ([512] * 1030, 0),
}


class Bench:
    """Slabs to move pages to and from.

    Parameters
    ----------
    directory : Path
    lengths : sequence of int
        Of a page's segments.
    slots : int
        A slab.
    """

    def __init__(self, directory: Path, lengths: Sequence[int], slots: int = 16) -> None:
        self.directory = directory
        self.nbytes = np.array(lengths, np.uint64)
        page_nbytes = sum(lengths)
        stride = -(-page_nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self.shape = SlabShape(page_nbytes, stride, slots)
        self.cache = FileCache(64)

    def slab(self, name: str = "slab", *, writable: bool = True) -> StoreFile:
        """Open a slab, creating it where there is none."""
        path = self.directory / name
        if not path.exists():
            create_slab(path, self.shape)
        return StoreFile(path, self.shape.file_nbytes, self.cache, writable=writable)

    def batch(self, memory: Memory, places: Sequence[tuple[StoreFile, int]]) -> PageBatch:
        """Name the (slab, slot) of each page of `memory`."""
        shape = self.shape
        offsets = np.array([slot * shape.stride for _, slot in places], np.int64)
        return PageBatch(
            [slab for slab, _ in places],
            offsets,
            memory.addresses,
            self.nbytes,
            shape.page_nbytes,
            shape.stride,
            memory=memory.device,
        )

    def on_disk(self, slab: StoreFile, slot: int) -> bytes:
        """Return a slot's page, read plainly."""
        with slab.path.open("rb") as file:
            file.seek(slot * self.shape.stride)
            return file.read(self.shape.page_nbytes)

    def close(self) -> None:
        """Close the files."""
        self.cache.close()


class Memory:
    """Pages in memory, in segments with bytes between them that nobody may change.

    Attributes
    ----------
    addresses : uint64 [n, F]
    device : DeviceMemory or None
        None: they are in host memory.
    """

    device: DeviceMemory | None = None

    def __init__(
        self, lengths: Sequence[int], pages: int, *, between: int, shift: int = 0, seed: int = 0
    ) -> None:
        steps = np.array(lengths, np.int64) + between
        starts = np.cumsum(steps) - steps
        self._page_step = -(-int(steps.sum()) // SLOT_ALIGNMENT) * SLOT_ALIGNMENT + (8192 if shift else 0)
        raw = np.full(self._page_step * pages + 2 * SLOT_ALIGNMENT, 0x5A, np.uint8)
        skew = -raw.ctypes.data % SLOT_ALIGNMENT + shift
        self._bytes = raw[skew : skew + self._page_step * pages].reshape(pages, self._page_step)
        self._at = np.concatenate(
            [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        )
        self._rng = np.random.default_rng(seed)
        first = self._bytes.ctypes.data + np.arange(pages, dtype=np.int64) * self._page_step
        self.addresses = (first[:, None] + starts[None]).astype(np.uint64)

    def fill(self) -> None:
        """Write random bytes into every segment."""
        shape = (len(self._bytes), len(self._at))
        self._bytes[:, self._at] = self._rng.integers(0, 256, shape, np.uint8)

    def page(self, number: int) -> bytes:
        """Return a page's bytes in stored order."""
        return bytes(self._bytes[number, self._at])

    def between_untouched(self) -> bool:
        """Whether the bytes outside all segments are as they were."""
        outside = np.ones(self._page_step, np.bool_)
        outside[self._at] = False
        return bool((self._bytes[:, outside] == 0x5A).all())


class HookLog:
    """Counts the hook's calls for each page."""

    def __init__(self, pages: int) -> None:
        self.calls = [0] * pages
        self._lock = threading.Lock()

    def __call__(self, first: int, last: int) -> None:
        """Count pages `first..last-1`."""
        assert first < last
        with self._lock:
            for page in range(first, last):
                self.calls[page] += 1


class ByteEngineSuite:
    """What every byte engine must do, byte by byte and verdict by verdict."""

    def make_engine(self, directory: Path) -> ByteEngine:
        """Return an engine for files in `directory`."""
        raise NotImplementedError

    def memory(self, lengths: Sequence[int], pages: int, **options: int) -> Memory:
        """Return pages for a test: in host memory, unless a subclass has another kind."""
        return Memory(lengths, pages, **options)

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[ByteEngine]:
        """Make the engine, and close it at the end."""
        engine = self.make_engine(tmp_path)
        yield engine
        engine.close()

    def test_says_what_it_is(self, engine: ByteEngine) -> None:
        assert isinstance(engine, ByteEngine)
        assert engine.name
        assert engine.mode

    @pytest.mark.parametrize("shift", [0, 1, 512], ids=["aligned", "off_by_one", "off_by_512"])
    @pytest.mark.parametrize("kind", PAGES)
    def test_round_trip(self, engine: ByteEngine, tmp_path: Path, kind: str, shift: int) -> None:
        lengths, between = PAGES[kind]
        bench = Bench(tmp_path, lengths)
        slab = bench.slab()
        slots = [0, 1, 2, 5, 15]
        source = self.memory(lengths, len(slots), between=between, shift=shift)
        source.fill()
        places = [(slab, slot) for slot in slots]
        assert engine.write(bench.batch(source, places)) == [""] * len(slots)
        for page, slot in enumerate(slots):
            assert bench.on_disk(slab, slot) == source.page(page)
        target = self.memory(lengths, len(slots), between=between, shift=shift)
        assert engine.read(bench.batch(target, places)) == [""] * len(slots)
        for page in range(len(slots)):
            assert target.page(page) == source.page(page)
        assert target.between_untouched()
        bench.close()

    def test_slots_not_named_keep_their_bytes(self, engine: ByteEngine, tmp_path: Path) -> None:
        bench = Bench(tmp_path, [5000, 3])
        slab = bench.slab()
        memory = self.memory([5000, 3], 16, between=0)
        memory.fill()
        engine.write(bench.batch(memory, [(slab, slot) for slot in range(16)]))
        before = [bench.on_disk(slab, slot) for slot in range(16)]
        other = self.memory([5000, 3], 2, between=0, seed=9)
        other.fill()
        assert engine.write(bench.batch(other, [(slab, 3), (slab, 4)])) == ["", ""]
        after = [bench.on_disk(slab, slot) for slot in range(16)]
        assert after[3:5] == [other.page(0), other.page(1)]
        assert after[:3] + after[5:] == before[:3] + before[5:]
        with slab.path.open("rb") as file:
            file.seek(bench.shape.data_nbytes)
            assert file.read() == bench.shape.tail()
        bench.close()

    def test_many_pages_in_several_files_in_any_order(self, engine: ByteEngine, tmp_path: Path) -> None:
        bench = Bench(tmp_path, [1024, 3072], slots=64)
        slabs = [bench.slab(f"slab{number}") for number in range(3)]
        places = [(slab, slot) for slab in slabs for slot in range(64)]
        places = [places[i] for i in np.random.default_rng(3).permutation(len(places)).tolist()]
        source = self.memory([1024, 3072], len(places), between=0)
        source.fill()
        assert engine.write(bench.batch(source, places)) == [""] * len(places)
        for page, (slab, slot) in enumerate(places):
            assert bench.on_disk(slab, slot) == source.page(page)
        target = self.memory([1024, 3072], len(places), between=0)
        assert engine.read(bench.batch(target, places)) == [""] * len(places)
        assert all(target.page(page) == source.page(page) for page in range(len(places)))
        bench.close()

    def test_no_page_is_no_work(self, engine: ByteEngine, tmp_path: Path) -> None:
        bench = Bench(tmp_path, [100])
        memory = self.memory([100], 0, between=0)
        assert engine.write(bench.batch(memory, [])) == []
        assert engine.read(bench.batch(memory, [])) == []

    @pytest.mark.parametrize("damage", ["cut", "missing", "replaced", "grown"])
    @pytest.mark.parametrize("verb", ["read", "write"])
    def test_a_damaged_file_fails_its_pages_alone(
        self, engine: ByteEngine, tmp_path: Path, damage: str, verb: str
    ) -> None:
        bench = Bench(tmp_path, [4096])
        slabs = [bench.slab(f"slab{number}") for number in range(3)]
        places = [(slab, slot) for slab in slabs for slot in range(4)]
        memory = self.memory([4096], len(places), between=0)
        memory.fill()
        assert not any(engine.write(bench.batch(memory, places)))
        _damage(slabs[1].path, damage)
        batch = bench.batch(memory, places)
        log = batch.hook = HookLog(len(places))
        reasons = engine.read(batch) if verb == "read" else engine.write(batch)
        assert [bool(reason) for reason in reasons] == [False] * 4 + [True] * 4 + [False] * 4
        if verb == "read":
            assert log.calls == [1] * 4 + [0] * 4 + [1] * 4
        bench.close()

    def test_a_file_opened_for_reading_refuses_writes(self, engine: ByteEngine, tmp_path: Path) -> None:
        bench = Bench(tmp_path, [4096])
        bench.slab()
        slab = bench.slab(writable=False)
        memory = self.memory([4096], 2, between=0)
        memory.fill()
        assert all(engine.write(bench.batch(memory, [(slab, 0), (slab, 1)])))
        assert bench.on_disk(slab, 0) == bytes(4096)
        assert not any(engine.read(bench.batch(memory, [(slab, 0), (slab, 1)])))
        assert memory.page(1) == bytes(4096)
        bench.close()

    @pytest.mark.parametrize("kind", ["one_run", "odd_pieces", "many_pieces"])
    def test_hook_runs_once_a_page_before_its_write(
        self, engine: ByteEngine, tmp_path: Path, kind: str
    ) -> None:
        lengths, between = PAGES[kind]
        bench = Bench(tmp_path, lengths, slots=32)
        slab = bench.slab()
        slots = [*range(9), 25, 31]
        memory = self.memory(lengths, len(slots), between=between)
        memory.fill()
        batch = bench.batch(memory, [(slab, slot) for slot in slots])
        log = HookLog(len(slots))
        early: list[bool] = []

        def hook(first: int, last: int) -> None:
            log(first, last)
            early.extend(not any(bench.on_disk(slab, slots[page])) for page in range(first, last))

        batch.hook = hook
        assert not any(engine.write(batch))
        assert log.calls == [1] * len(slots)
        assert all(early)
        bench.close()

    @pytest.mark.parametrize("kind", ["one_run", "odd_pieces", "many_pieces"])
    def test_hook_runs_once_a_page_after_its_read(
        self, engine: ByteEngine, tmp_path: Path, kind: str
    ) -> None:
        lengths, between = PAGES[kind]
        bench = Bench(tmp_path, lengths, slots=32)
        slab = bench.slab()
        slots = [*range(9), 25, 31]
        source = self.memory(lengths, len(slots), between=between)
        source.fill()
        places = [(slab, slot) for slot in slots]
        assert not any(engine.write(bench.batch(source, places)))
        target = self.memory(lengths, len(slots), between=between)
        batch = bench.batch(target, places)
        log = HookLog(len(slots))
        there: list[bool] = []

        def hook(first: int, last: int) -> None:
            log(first, last)
            there.extend(target.page(page) == source.page(page) for page in range(first, last))

        batch.hook = hook
        assert not any(engine.read(batch))
        assert log.calls == [1] * len(slots)
        assert all(there)
        bench.close()

    def test_batches_run_side_by_side(self, engine: ByteEngine, tmp_path: Path) -> None:
        lengths = [1000, 24, 3072]
        bench = Bench(tmp_path, lengths, slots=64)
        slabs = [bench.slab(f"slab{number}") for number in range(4)]

        def work(number: int) -> bool:
            places = [(slabs[number], slot) for slot in range(64)]
            good = True
            for turn in range(3):
                source = self.memory(lengths, 64, between=0, seed=100 * number + turn)
                source.fill()
                good &= not any(engine.write(bench.batch(source, places)))
                target = self.memory(lengths, 64, between=0)
                good &= not any(engine.read(bench.batch(target, places)))
                good &= all(target.page(page) == source.page(page) for page in range(64))
            return good

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(work, number) for number in range(4)]
            assert all(future.result(_TIMEOUT_S) for future in futures)
        bench.close()

    def test_close_twice(self, tmp_path: Path) -> None:
        engine = self.make_engine(tmp_path)
        engine.close()
        engine.close()


def _damage(path: Path, how: str) -> None:
    if how == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif how == "grown":
        os.truncate(path, path.stat().st_size + 1)
    elif how == "missing":
        path.unlink()
    else:
        copy = path.with_name("copy")
        copy.write_bytes(path.read_bytes())
        copy.replace(path)
