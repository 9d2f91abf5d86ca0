"""A Zarr v3 array written by tensorstore."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from .peer_arrays import ArrayPages

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from .storage_cases import StorageShape


class TensorStorePages(ArrayPages):
    """The array by tensorstore, by as many threads as the store has.

    tensorstore syncs each file by default, which no other contestant does: that is turned off.
    """

    @staticmethod
    def why_not() -> str:
        """Return why it cannot be measured, or ""."""
        if importlib.util.find_spec("tensorstore") is None:
            return "tensorstore is not installed: pip install tensorstore"
        return ""

    @staticmethod
    def _make(folder: Path, shape: StorageShape, size: tuple[int, int]) -> Any:  # noqa: ANN401 - tensorstore's
        import tensorstore

        return tensorstore.open(
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
                    "shape": list(size),
                    "data_type": "uint8",
                    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, size[1]]}},
                    "codecs": [{"name": "bytes"}],
                },
            },
            create=True,
        ).result()

    def _store(self, pages: slice, flat: NDArray[np.uint8]) -> None:
        self._array[pages].write(flat).result()

    def _fetch(self, pages: slice) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self._array[pages].read().result()
        return found
