"""Registering host memory with a device, in chunks."""

from __future__ import annotations

import ctypes
import logging
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

PAGE_NBYTES = 4096
CHUNK_NBYTES = 1 << 30
"""Bytes registered with CUDA in one call; one call over hundreds of GiB holds the driver for seconds."""
_HOST_REGISTER_PORTABLE = 1

Chunk = tuple[int, int]
"""Offset and length of a part of a memory, in bytes."""


def human(nbytes: int) -> str:
    """Return a byte count for people, in binary units."""
    import humanfriendly  # here, because copies need no words

    return str(humanfriendly.format_size(nbytes, binary=True))


class Registrar(Protocol):
    """Page-locks memory for a device."""

    def unavailable(self) -> str | None:
        """Return why nothing can be registered here, or None."""

    def register(self, address: int, nbytes: int) -> None:
        """Register a range; raises `RuntimeError` with the driver's words."""

    def unregister(self, address: int) -> None:
        """Undo `register`; raises `RuntimeError`."""

    def clear_error(self) -> None:
        """Clear the driver's sticky error, so that the next unrelated call does not report it."""


def _runtime() -> Any:  # noqa: ANN401 - a module of torch without types
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class CudaRegistrar:
    """`cudaHostRegister` through torch."""

    def unavailable(self) -> str | None:
        """Return why nothing can be registered here, or None."""
        return None if torch.cuda.is_available() else "no CUDA device"

    def register(self, address: int, nbytes: int) -> None:
        """Register a range, portable to all contexts."""
        self._check(_runtime().cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE))

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._check(_runtime().cudaHostUnregister(address))

    def clear_error(self) -> None:
        """Call `cudaGetLastError`, which torch does not expose, in the runtime that torch loaded."""
        runtime = next(
            (
                line.split()[-1]
                for line in Path("/proc/self/maps").read_text().splitlines()
                if "libcudart" in line
            ),
            None,
        )
        if runtime is not None:
            ctypes.CDLL(runtime).cudaGetLastError()

    @staticmethod
    def _check(code: Any) -> None:  # noqa: ANN401 - an enum of torch without types
        value = int(code)
        if value:
            raise RuntimeError(f"CUDA error {value}: {_runtime().cudaGetErrorString(code)}")


def chunks_of(start: int, nbytes: int, unit: int, chunk_nbytes: int) -> list[Chunk]:
    """Split a region into chunks of at most `chunk_nbytes` that no unit straddles.

    The driver refuses a copy (`cudaErrorInvalidValue`, seen with CUDA 13.0) that crosses from one registered
    range into the next, so seams must lie where no copy crosses: between units.

    Parameters
    ----------
    start, nbytes : int
        The region, in bytes from the start of the memory; multiples of 4096.
    unit : int
        Bytes of what must stay in one piece; units tile the region from its start.
    chunk_nbytes : int
        Exceeded only where fewer bytes hold no whole number of both units and memory pages.
    """
    step = lcm(unit, PAGE_NBYTES)
    size = max(1, chunk_nbytes // step) * step
    return [(at, min(size, start + nbytes - at)) for at in range(start, start + nbytes, size)]


def register_chunks(registrar: Registrar, address: int, chunks: Sequence[Chunk]) -> tuple[int, ...]:
    """Register chunks of the memory at `address` and return theirs; undone and cleared where one fails.

    Raises
    ------
    RuntimeError
        Says which chunk failed and why. No chunk is registered then.
    """
    done: list[int] = []
    for number, (offset, nbytes) in enumerate(chunks, start=1):
        try:
            registrar.register(address + offset, nbytes)
        except RuntimeError as error:
            registrar.clear_error()
            unregister_chunks(registrar, tuple(done))
            raise RuntimeError(
                f"registering chunk {number} of {len(chunks)} ({human(nbytes)}) failed: {error}"
            ) from error
        done.append(address + offset)
    return tuple(done)


def unregister_chunks(registrar: Registrar, addresses: tuple[int, ...]) -> None:
    """Unregister all chunks; one that fails is logged, cleared, and does not keep the others."""
    for address in reversed(addresses):
        try:
            registrar.unregister(address)
        except RuntimeError as error:
            registrar.clear_error()
            log.warning("unregistering host memory at %#x failed: %s", address, error)
