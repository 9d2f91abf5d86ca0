"""A Zarr v3 array written by zarr-python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import zarr

from .peer_arrays import ArrayPages

if TYPE_CHECKING:
    from pathlib import Path

    from .storage_cases import StorageShape


class ZarrPages(ArrayPages):
    """The array by zarr-python."""

    @staticmethod
    def why_not() -> str:
        """Return "": zarr-python is a dependency of this project."""
        return ""

    @staticmethod
    def _make(folder: Path, shape: StorageShape, size: tuple[int, int]) -> Any:  # noqa: ANN401 - zarr's
        del shape
        return zarr.create_array(
            folder, shape=size, chunks=(1, size[1]), dtype="uint8", compressors=None, filters=None
        )
