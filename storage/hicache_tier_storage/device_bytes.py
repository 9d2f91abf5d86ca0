"""Memory of a CUDA device, as packages of CUDA take it, and memory of one's own."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch


class DeviceBytes:
    """A stretch of a device's memory, without owning it.

    Parameters
    ----------
    address, nbytes : int
    """

    __slots__ = ("_address", "_nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self._address, self._nbytes = address, nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self._nbytes,),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 3,
        }


class _Allocation(DeviceBytes):
    """Memory that is given back with this object, which torch holds as long as any tensor of it lives."""

    __slots__ = ()

    def __del__(self) -> None:
        _driver().cuMemFree_v2(ctypes.c_uint64(self._address))


def own_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return zeroed bytes of a device that are an allocation of their own.

    cuFile registers whole allocations; torch's allocator puts many tensors into one.

    Raises
    ------
    MemoryError
    """
    address = ctypes.c_uint64()
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # a call of the runtime: makes the device's context this thread's
        code = _driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes))
    if code:
        raise MemoryError(f"{nbytes} bytes of {device} cannot be had (CUDA error {code})")
    return torch.as_tensor(_Allocation(address.value, nbytes), device=device).zero_()


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
