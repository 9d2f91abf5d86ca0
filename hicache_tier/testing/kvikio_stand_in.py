"""What stands for `kvikio.CuFile` where there is no GPU: host memory, by its address, and a few threads."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future


class IOFuture:
    """As kvikio's."""

    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether the call has ended."""
        return self._future.done()

    def get(self) -> int:
        """Return the bytes that were moved, or raise what the call raised."""
        return self._future.result()


class CuFile:
    """A file that moves memory by its address.

    Attributes
    ----------
    calls : list of (offset, nbytes)
        Of all files, in the order in which they were made.
    """

    calls: ClassVar[list[tuple[int, int]]] = []
    _pool = ThreadPoolExecutor(2)

    def __init__(self, path: str | os.PathLike[str], flags: str) -> None:
        self._fd = os.open(path, {"r": os.O_RDONLY, "r+": os.O_RDWR}[flags])

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def pread(self, memory: Any, file_offset: int = 0) -> IOFuture:  # noqa: ANN401 - has an array interface
        """Begin to read."""
        return self._submit(os.preadv, memory, file_offset)

    def pwrite(self, memory: Any, file_offset: int = 0) -> IOFuture:  # noqa: ANN401 - has an array interface
        """Begin to write."""
        return self._submit(os.pwritev, memory, file_offset)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _submit(self, call: Callable[..., int], memory: Any, file_offset: int) -> IOFuture:  # noqa: ANN401
        seen = memory.__cuda_array_interface__
        nbytes = seen["shape"][0]
        self.calls.append((file_offset, nbytes))
        raw = (ctypes.c_uint8 * nbytes).from_address(seen["data"][0])
        return IOFuture(self._pool.submit(call, self._fd, [np.frombuffer(raw, np.uint8)], file_offset))
