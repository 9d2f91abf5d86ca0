"""A Zarr v3 array written by zarr-python, one chunk a page."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import zarr

from .page_cache import Cache
from .peers import flat_page, spread_page

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .storage_cases import StorageShape


def why_not() -> str:
    """Return "": zarr-python is a dependency of this project."""
    return ""


def make(
    folder: Path,
    shape: StorageShape,
    sources: Sequence[list[memoryview]],
    targets: Sequence[list[memoryview]],
) -> ZarrPages:
    """Return the peer."""
    return ZarrPages(folder, shape, sources, targets)


class ZarrPages:
    """`[page, byte]` in chunks of one page without a codec, so many pages a selection as the store gets.

    zarr-python takes arrays, not lists of segments: pages are flattened before a write and copied to their
    places after a read.
    """

    cache = Cache.DROPPED
    moves_pages = True

    def __init__(
        self,
        folder: Path,
        shape: StorageShape,
        sources: Sequence[list[memoryview]],
        targets: Sequence[list[memoryview]],
    ) -> None:
        self._chunks = folder / "c"
        self._depth = shape.depth
        self._sources, self._targets = sources, targets
        pages, nbytes = len(sources), shape.case.page_nbytes
        self._array = zarr.create_array(
            folder, shape=(pages, nbytes), chunks=(1, nbytes), dtype="uint8", compressors=None, filters=None
        )

    def write(self) -> None:
        """Write every page."""
        for start in range(0, len(self._sources), self._depth):
            batch = self._sources[start : start + self._depth]
            flat = np.stack([np.frombuffer(flat_page(page), np.uint8) for page in batch])
            self._array[start : start + len(batch)] = flat

    def read(self) -> None:
        """Read every page."""
        for start in range(0, len(self._targets), self._depth):
            batch = self._targets[start : start + self._depth]
            found = np.asarray(self._array[start : start + len(batch)])
            for row, page in zip(found, batch, strict=True):
                spread_page(row.data, page)

    def files(self) -> list[Path]:
        """Return the files of the chunks."""
        return [path for path in self._chunks.rglob("*") if path.is_file()]

    def remove(self) -> None:
        """Delete the chunks."""
        shutil.rmtree(self._chunks, ignore_errors=True)

    def close(self) -> None:
        """Nothing is open."""
