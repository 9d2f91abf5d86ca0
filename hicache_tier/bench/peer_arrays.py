"""Zarr v3 arrays `[page, byte]`, one chunk a page without a codec, whoever writes them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

from .page_cache import Cache
from .peers import flat_page, spread_page

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from .storage_cases import StorageShape


class ArrayPages:
    """Writes and reads so many pages a selection as the store gets.

    Arrays are taken, not lists of segments: pages are flattened before a write and copied to their places
    after a read.
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
        self._array = self._make(folder, shape, (len(sources), shape.case.page_nbytes))

    @staticmethod
    def _make(folder: Path, shape: StorageShape, size: tuple[int, int]) -> Any:  # noqa: ANN401 - each library's own
        """Return the array."""
        raise NotImplementedError

    def _store(self, pages: slice, flat: NDArray[np.uint8]) -> None:
        self._array[pages] = flat

    def _fetch(self, pages: slice) -> NDArray[np.uint8]:
        return np.asarray(self._array[pages])

    def write(self) -> None:
        """Write every page."""
        for start in range(0, len(self._sources), self._depth):
            batch = self._sources[start : start + self._depth]
            flat = np.stack([np.frombuffer(flat_page(page), np.uint8) for page in batch])
            self._store(slice(start, start + len(batch)), flat)

    def read(self) -> None:
        """Read every page."""
        for start in range(0, len(self._targets), self._depth):
            batch = self._targets[start : start + self._depth]
            found = self._fetch(slice(start, start + len(batch)))
            for row, page in zip(found, batch, strict=True):
                spread_page(row.data, page)

    def files(self) -> list[Path]:
        """Return the files of the chunks."""
        return [path for path in self._chunks.rglob("*") if path.is_file()]

    def remove(self) -> None:
        """Delete the chunks."""
        shutil.rmtree(self._chunks, ignore_errors=True)

    def close(self) -> None:
        """Nothing is held that needs closing."""
