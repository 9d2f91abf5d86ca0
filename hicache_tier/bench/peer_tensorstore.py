"""A Zarr v3 array written by tensorstore, one chunk a page."""

from __future__ import annotations

import importlib.util
import shutil
from typing import TYPE_CHECKING

import numpy as np

from .page_cache import Cache
from .peers import flat_page, spread_page

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .storage_cases import StorageShape


def why_not() -> str:
    """Return why it cannot be measured, or ""."""
    if importlib.util.find_spec("tensorstore") is None:
        return "tensorstore is not installed: pip install tensorstore"
    return ""


def make(
    folder: Path,
    shape: StorageShape,
    sources: Sequence[list[memoryview]],
    targets: Sequence[list[memoryview]],
) -> TensorStorePages:
    """Return the peer."""
    return TensorStorePages(folder, shape, sources, targets)


class TensorStorePages:
    """`[page, byte]` in chunks of one page without a codec, by as many threads as the store has.

    tensorstore syncs each file by default, which no other contestant does: that is turned off. Pages are
    flattened before a write and copied to their places after a read.
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
        import tensorstore

        self._chunks = folder / "c"
        self._depth = shape.depth
        self._sources, self._targets = sources, targets
        pages, nbytes = len(sources), shape.case.page_nbytes
        self._array = tensorstore.open(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": f"{folder}/"},
                "context": {
                    "file_io_concurrency": {"limit": shape.threads},
                    "data_copy_concurrency": {"limit": shape.threads},
                    "file_io_sync": False,
                    "cache_pool": {"total_bytes_limit": 0},
                },
                "metadata": {
                    "shape": [pages, nbytes],
                    "data_type": "uint8",
                    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, nbytes]}},
                    "codecs": [{"name": "bytes"}],
                },
            },
            create=True,
        ).result()

    def write(self) -> None:
        """Write every page."""
        for start in range(0, len(self._sources), self._depth):
            batch = self._sources[start : start + self._depth]
            flat = np.stack([np.frombuffer(flat_page(page), np.uint8) for page in batch])
            self._array[start : start + len(batch)].write(flat).result()

    def read(self) -> None:
        """Read every page."""
        for start in range(0, len(self._targets), self._depth):
            batch = self._targets[start : start + self._depth]
            found = self._array[start : start + len(batch)].read().result()
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
