"""The few calls of the CUDA driver that the engines need, through ctypes.

Nothing is loaded before a CUDA device is used: `driver()` opens `libcuda.so.1` on its first call.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

_BATCH_VERSION = 12080
"""The signature of `cuMemcpyBatchAsync` that CUDA 12.8 defined; CUDA 13 redefined the plain symbol."""
_ACCESS_ORDER_STREAM = 1
_OVERLAP_WITH_COMPUTE = 1


class DriverError(RuntimeError):
    """A call of the driver failed; the message has its name and the driver's words."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("access_order", c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", c_uint),
    )


class Driver:
    """`libcuda`, with errors raised."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        self._check("cuInit", self._lib.cuInit(0))
        self._launch = self._lib.cuLaunchKernel
        self._launch.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
        self._batch = self._batch_entry()
        self._attributes = _CopyAttributes(access_order=_ACCESS_ORDER_STREAM, flags=_OVERLAP_WITH_COMPUTE)
        self._attribute_start = c_size_t(0)
        self._attributes_at, self._attribute_start_at = map(
            ctypes.addressof, (self._attributes, self._attribute_start)
        )

    @property
    def version(self) -> int:
        """The driver's CUDA version, as 1000 * major + 10 * minor."""
        found = c_int()
        self._check("cuDriverGetVersion", self._lib.cuDriverGetVersion(byref(found)))
        return found.value

    @property
    def has_batch_copy(self) -> bool:
        """Whether `cuMemcpyBatchAsync` is there (CUDA 12.8)."""
        return self._batch is not None

    def load_module(self, cubin: bytes) -> int:
        """Load machine code into the current context."""
        module = c_void_p()
        self._check("cuModuleLoadData", self._lib.cuModuleLoadData(byref(module), c_char_p(cubin)))
        return int(module.value or 0)

    def function(self, module: int, name: str) -> int:
        """Return a kernel of a module."""
        found = c_void_p()
        code = self._lib.cuModuleGetFunction(byref(found), c_void_p(module), name.encode())
        self._check("cuModuleGetFunction", code)
        return int(found.value or 0)

    def launch(self, function: int, blocks: int, threads: int, stream: int, arguments: object) -> None:
        """Launch a one-dimensional grid; `arguments` is a ctypes array of pointers to the arguments."""
        code = self._launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, None)
        if code:
            self._check("cuLaunchKernel", code)

    def copy_batch(self, ranges: NDArray[np.uint64], part: slice, stream: int) -> None:
        """Copy some of many ranges in one call, in no given order among them.

        Parameters
        ----------
        ranges : numpy.ndarray
            uint64 `[3, n]`, contiguous: addresses of destinations and of sources, and bytes.
        part : slice
            Which of them: start and stop within `n`.
        stream : int
        """
        if self._batch is None:
            raise DriverError(f"cuMemcpyBatchAsync needs CUDA 12.8; this driver has {self.version}")
        failed = c_size_t(0)
        row, at = ranges.strides[0], ranges.ctypes.data + part.start * ranges.itemsize
        code = self._batch(
            at,
            at + row,
            at + 2 * row,
            part.stop - part.start,
            self._attributes_at,
            self._attribute_start_at,
            1,
            byref(failed),
            stream,
        )
        if code:
            number = min(part.start + failed.value, part.stop - 1)
            destination, source, nbytes = ranges[:, number].tolist()
            what = f"range {number}, {nbytes} bytes, {source:#x} to {destination:#x}"
            self._check(f"cuMemcpyBatchAsync ({what})", code)

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Copy one range; either side may be host or device memory."""
        code = self._lib.cuMemcpyAsync(
            c_uint64(destination), c_uint64(source), c_size_t(nbytes), c_void_p(stream)
        )
        self._check("cuMemcpyAsync", code)

    def _batch_entry(self) -> Any:  # noqa: ANN401 - a function pointer of ctypes
        entry, status = c_void_p(), c_int()
        try:
            find = self._lib.cuGetProcAddress_v2
        except AttributeError:
            return None
        code = find(b"cuMemcpyBatchAsync", byref(entry), c_int(_BATCH_VERSION), c_uint64(0), byref(status))
        if code or not entry.value:
            return None
        return ctypes.CFUNCTYPE(
            c_int, *[c_void_p] * 3, c_size_t, c_void_p, c_void_p, c_size_t, *[c_void_p] * 2
        )(entry.value)

    def _check(self, call: str, code: int) -> None:
        if not code:
            return
        name, text = c_char_p(), c_char_p()
        self._lib.cuGetErrorName(code, byref(name))
        self._lib.cuGetErrorString(code, byref(text))
        words = [part.value.decode() for part in (name, text) if part.value]
        raise DriverError(f"{call}: {': '.join(words) or f'error {code}'}")


@cache
def driver() -> Driver:
    """Return the driver.

    Raises
    ------
    DriverError
        Where there is none, or it refuses to start.
    """
    try:
        return Driver()
    except OSError as error:
        raise DriverError(f"no CUDA driver: {error}") from error


def pointers(values: Sequence[Any], *last: int) -> ctypes.Array[c_void_p]:
    """Return the array of pointers to kernel arguments that `Driver.launch` takes.

    The arguments must outlive it; change their `.value` to launch again with others. `last` are addresses of
    arguments that are structures.
    """
    return (c_void_p * (len(values) + len(last)))(*[ctypes.addressof(value) for value in values], *last)
