"""NIXL's POSIX plug-in over one file: its transfers without a store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier_storage.accelerators import nixl_posix
from hicache_tier_storage.engine import PageBatch
from hicache_tier_storage.nixl_lane import QUEUES
from hicache_tier_storage.nixl_package import why_no_nixl
from hicache_tier_storage.slab import SLOT_ALIGNMENT, FileCache, StoreFile

from .errors import BenchError
from .page_cache import Cache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .storage_cases import StorageShape


class NixlPages:
    """Pages one after another in one file, moved by this project's lanes of NIXL.

    Raises
    ------
    BenchError
        Where no queue of the plug-in works there.
    """

    moves_pages = True

    @staticmethod
    def why_not() -> str:
        """Return why it cannot be measured, or ""."""
        return why_no_nixl()

    def __init__(
        self,
        folder: Path,
        shape: StorageShape,
        sources: Sequence[list[memoryview]],
        targets: Sequence[list[memoryview]],
    ) -> None:
        from hicache_tier_storage.nixl_engine import NixlEngine

        direct = shape.mode == "direct"
        self.cache = Cache.BYPASSED if direct else Cache.DROPPED
        found = nixl_posix(folder, direct=direct)
        queue = next((name for name, row in zip(QUEUES, found, strict=True) if row.usable), None)
        if queue is None:
            raise BenchError("; ".join(row.reason for row in found))
        nbytes = shape.case.page_nbytes
        stride = -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self._path = folder / "pages"
        with self._path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, stride * len(sources))
        self._files = FileCache(4)
        file_of_all = StoreFile(self._path, stride * len(sources), self._files, writable=True)

        def batches(pages: Sequence[list[memoryview]]) -> list[PageBatch]:
            return [
                PageBatch(
                    [file_of_all] * len(part),
                    np.arange(start, start + len(part), dtype=np.int64) * stride,
                    np.array([[_address(segment) for segment in page] for page in part], np.uint64),
                    np.array([len(segment) for segment in part[0]], np.uint64),
                    nbytes,
                    stride,
                )
                for start in range(0, len(pages), shape.depth)
                for part in [pages[start : start + shape.depth]]
            ]

        self._writes, self._reads = batches(sources), batches(targets)
        self._engine = NixlEngine(direct=direct, queue=queue, threads=shape.threads)

    def write(self) -> None:
        """Write every page."""
        for batch in self._writes:
            _check(self._engine.write(batch))

    def read(self) -> None:
        """Read every page."""
        for batch in self._reads:
            _check(self._engine.read(batch))

    def files(self) -> list[Path]:
        """Return the one file."""
        return [self._path]

    def remove(self) -> None:
        """Leave the file: it is written in place, as slabs are."""

    def close(self) -> None:
        """End the lanes."""
        self._engine.close()
        self._files.close()


def _address(segment: memoryview) -> int:
    return int(np.frombuffer(segment, np.uint8).ctypes.data)


def _check(reasons: list[str]) -> None:
    wrong = next(filter(None, reasons), None)
    if wrong:
        raise BenchError(f"nixl failed: {wrong}")
