"""Pages of a store as arrays that xarray reads on demand. Needs the extra `xarray`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from xarray.backends import BackendArray
from xarray.core import indexing

if TYPE_CHECKING:
    import zarr
    from numpy.typing import NDArray


def numpy_dtype(label: str) -> np.dtype[Any]:
    """NumPy dtype of a logical dtype: NumPy's own, or one of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, label, label))


class LazyPages(BackendArray):
    """The `pages` array, or one component of it where a page is stored as bytes, read when asked for.

    Parameters
    ----------
    array : zarr.Array
        `[slot, *page]` of the storage dtype, or uint8 `[slot, byte]`.
    dtype : numpy.dtype
        What the bytes mean.
    component : (offset, shape), optional
        Byte offset and shape of the component within a page of bytes.
    """

    def __init__(
        self,
        array: zarr.Array[Any],
        dtype: np.dtype[Any],
        component: tuple[int, tuple[int, ...]] | None = None,
    ) -> None:
        self._array = array
        self._component = component
        self.dtype = dtype
        self.shape = array.shape if component is None else (array.shape[0], *component[1])

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:  # noqa: ANN401 - what xarray's adapter returns
        """Read what `key` selects."""
        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.OUTER, self._select
        )

    def _select(self, key: tuple[Any, ...]) -> NDArray[Any]:
        parts = tuple(_forward(part, size) for part, size in zip(key, self.shape, strict=True))
        if self._component is None:
            return np.asarray(self._array.oindex[parts]).view(self.dtype)
        offset, shape = self._component
        end = offset + int(np.prod(shape)) * self.dtype.itemsize
        raw = np.ascontiguousarray(self._array.oindex[parts[0], slice(offset, end)])
        pages = raw.view(self.dtype).reshape(*raw.shape[:-1], *shape)
        first = pages.ndim - len(shape)
        for axis in reversed(range(len(shape))):
            pages = pages[(slice(None),) * (first + axis) + (parts[1 + axis],)]
        return pages


def _forward(part: Any, size: int) -> Any:  # noqa: ANN401 - an index: int, slice or array
    """Spell a slice that runs backwards as numbers; Zarr's go forwards only."""
    return np.arange(size)[part] if isinstance(part, slice) and (part.step or 1) < 0 else part
