"""Memory of a CUDA device, as packages of CUDA take it."""

from __future__ import annotations

from typing import Any


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
