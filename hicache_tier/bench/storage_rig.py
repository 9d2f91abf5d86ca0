"""A store in a folder of its own, a pool of random pages, and ways to move them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hicache_tier_storage import EncryptionKey, open_store
from hicache_tier_storage.capacity import partition_paths
from hicache_tier_storage.partition_facts import PartitionFacts
from hicache_tier_storage.slab import SLOT_ALIGNMENT

from .bare_loop import BareLoop
from .errors import BenchError
from .page_cache import MOST_RESIDENT, Cache, drop, resident_share, write_out
from .storage_pages import make_keys, page_buffers, page_bytes, random_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .storage_cases import StorageShape


class StorageRig:
    """Pages of a shape and the store that they go to.

    Parameters
    ----------
    root : Path
        Directory to measure in; a folder of its own is made there, and removed by `close`.
    shape : StorageShape
    engine : str
        Byte engine of the store.

    Attributes
    ----------
    buffers, spare_buffers : list of list of memoryview
        Segments of the pages with random bytes, and of as many to read into.
    """

    def __init__(self, root: Path, shape: StorageShape, engine: str = "posix") -> None:
        case = shape.case
        self.shape, self.engine = shape, engine
        self._host = random_pool(case.geometry, shape.layout, case.pages)
        self._keys = make_keys("bench", case.pages)
        self._pages = torch.arange(case.pages)
        self.spare = torch.arange(case.pages, 2 * case.pages)
        self.folder = Path(tempfile.mkdtemp(prefix="hct-bench-", dir=root))
        try:
            self._store = open_store(
                self.folder / "store",
                case.geometry,
                layout=shape.layout,
                capacity_bytes=8 * case.nbytes,
                io_mode=shape.mode,
                threads=shape.threads,
                checksums=shape.checksums,
                verify="always",
                engine=engine,
                encryption=EncryptionKey(os.urandom(32)) if shape.encrypted else None,
            )
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.buffers = page_buffers(self._host, range(case.pages))
        self.spare_buffers = page_buffers(self._host, range(case.pages, 2 * case.pages))

    def check(self) -> None:
        """Store every page, load it elsewhere, compare every byte; leaves the pages stored."""
        self.blank_spare()
        self.put()
        self.get(self.spare)
        self.compare("the store", range(self.shape.case.pages))

    def check_bypass(self) -> None:
        """Raise `BenchError` where pages lie in memory after reads that were to bypass the page cache.

        An engine may go on buffered where the medium refuses O_DIRECT; whatever it says, `mincore` sees it.
        """
        if self.shape.cache is not Cache.BYPASSED:
            return
        slabs = sorted({path for path, _ in self.slots()})
        drop(slabs)
        self.get()
        share = resident_share(slabs)
        if share > MOST_RESIDENT:
            raise BenchError(
                f"engine {self.engine} was to bypass the page cache; {share:.0%} of the pages went through "
                f"it. Its mode is {self._store.stats()['mode']!r}."
            )

    def close(self) -> None:
        """Remove everything that was written."""
        self._store.close()
        self.buffers.clear()
        self.spare_buffers.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def put(self, wanted: range | None = None) -> None:
        """Store the pages (all where left out), `depth` a call."""
        self._all(wanted, lambda keys, at: self._store.put(keys, self._host, self._pages[at]))

    def get(self, into: torch.Tensor | None = None, wanted: range | None = None) -> None:
        """Load the pages into places of the pool (their own where left out), `depth` a call."""
        target = self._pages if into is None else into
        self._all(wanted, lambda keys, at: self._store.get(keys, self._host, target[at]))

    def _all(self, wanted: range | None, call: Callable[[list[bytes], slice], Sequence[object]]) -> None:
        """Make calls of at most `depth` pages; any refusal ends the benchmark."""
        pages = range(self.shape.case.pages) if wanted is None else wanted
        for start in range(pages.start, pages.stop, self.shape.depth):
            at = slice(start, min(start + self.shape.depth, pages.stop))
            if not all(call(self._keys[at], at)):
                stats = self._store.stats()
                raise BenchError(f"put or get failed: {stats['put']}, {stats['get']}")

    def delete(self, pages: range) -> None:
        """Remove pages from the store."""
        self._store.delete([self._keys[page] for page in pages])

    def clear(self) -> None:
        """Remove every page from the store."""
        self._store.clear()

    def blank_spare(self) -> None:
        """Zero the pages to read into."""
        for page in self.spare_buffers:
            for segment in page:
                segment[:] = bytes(len(segment))

    def compare(self, who: str, pages: range) -> None:
        """Compare the pages with those that were read into; `who` is blamed."""
        count = self.shape.case.pages
        for page in pages:
            if page_bytes(self._host, page) != page_bytes(self._host, page + count):
                raise BenchError(f"{who}: page {page} came back with other bytes")

    def slots(self) -> list[tuple[Path, int]]:
        """Return file and offset of as many slots as there are pages, in slot order."""
        paths = next(partition_paths(self.folder / "store"))
        facts = PartitionFacts.read(paths)
        slots, stride = facts.shape.slots, facts.shape.stride
        return [
            (paths.slab(number // slots, facts.page_axes), number % slots * stride)
            for number in range(self.shape.case.pages)
        ]

    def plain_file(self) -> list[tuple[Path, int]]:
        """Make a file with the pages one after another, for loops that must not touch slots in use."""
        path, nbytes = self.folder / "plain", self.shape.case.page_nbytes
        stride = -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        places = [(path, page * stride) for page in range(self.shape.case.pages)]
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, stride * len(places))
        loop = self.bare(places, range(len(places)))
        loop.write()
        loop.close()
        return places

    def bare(self, places: Sequence[tuple[Path, int]], pages: range, threads: int | None = None) -> BareLoop:
        """Return a bare loop of the same shape over places of pages."""
        return BareLoop(
            places,
            [self.buffers[page] for page in pages],
            direct=self.shape.mode == "direct",
            threads=threads or self.shape.threads,
            depth=self.shape.depth,
        )

    def settled(self, run: Callable[[], None], paths: Sequence[Path]) -> Callable[[], None]:
        """Have the clock stop when the device has the bytes, where the shape is measured cold."""
        if self.shape.cache is not Cache.DROPPED:
            return run

        def run_and_write_out() -> None:
            run()
            write_out(paths)

        return run_and_write_out

    def drop(self, paths: Sequence[Path]) -> None:
        """Put files out of the page cache, where the shape is measured cold through it."""
        if self.shape.cache is Cache.DROPPED:
            drop(paths)

    def dropping(self, paths: Sequence[Path]) -> Callable[[], None]:
        """Return `drop` of files as a call."""
        return lambda: self.drop(paths)
