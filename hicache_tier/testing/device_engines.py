"""Engines for memory of a device where host memory stands for it.

kvikio is a stand-in; NIXL is real, with its POSIX plug-in in place of GDS_MT.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_tier_storage import kvikio_engine, nixl_engine, staging
from hicache_tier_storage.checksum import page_checksum
from hicache_tier_storage.device_moves import RingMove
from hicache_tier_storage.engine import DeviceMemory
from hicache_tier_storage.kvikio_engine import KvikioEngine
from hicache_tier_storage.nixl_engine import NixlEngine
from hicache_tier_storage.nixl_lane import posix_plugin
from hicache_tier_storage.posix import PosixEngine

from .kvikio_stand_in import CuFile

if TYPE_CHECKING:
    import pytest
    from numpy.typing import NDArray

    from hicache_tier_storage.engine import ByteEngine, PageBatch
    from hicache_tier_storage.flights import Flight


def stand_in_for_kvikio(patch: pytest.MonkeyPatch, file: type = CuFile, mode: str = "OFF") -> None:
    """Let the engine `kvikio` take a class for `kvikio.CuFile`, and a compatibility mode for kvikio's."""
    patch.setattr(kvikio_engine, "kvikio_module", lambda: SimpleNamespace(CuFile=file))
    patch.setattr(kvikio_engine, "compat_mode", lambda: mode)
    patch.setattr(kvikio_engine, "use_threads", lambda count: None)  # noqa: ARG005 - as kvikio's


def posix_for_gds(patch: pytest.MonkeyPatch) -> None:
    """Let the engine `nixl` move a device's memory with the POSIX plug-in."""
    patch.setattr(nixl_engine, "gpu_plugin", lambda name, threads: posix_plugin("aio"))  # noqa: ARG005


def device_engine(kind: str, **options: Any) -> ByteEngine:  # noqa: ANN401 - of either engine
    """Return `kvikio` or `nixl`, with few threads, for memory of a device."""
    if kind == "kvikio":
        return KvikioEngine(direct=False, threads=2, **options)
    engine = NixlEngine(direct=False, threads=2, **options)
    engine.device_mode = "GDS_MT"
    return engine


class HostSummer:
    """Checksums of pages in host memory, as a device computes them of its own: begun, then taken."""

    def __init__(self, fragments: int, nbytes: int) -> None:
        self._lengths = [nbytes] * fragments

    def submit(self, addresses: NDArray[np.uint64], seeds: NDArray[np.uint64]) -> None:
        """Begin."""
        self._given = addresses.tolist(), seeds.tolist()

    def take(self) -> NDArray[np.uint64]:
        """Return the checksums."""
        rows = zip(*self._given, strict=True)
        return np.array([page_checksum(row, self._lengths, seed) for row, seed in rows], np.uint64)


def pretend_device(patch: pytest.MonkeyPatch) -> None:
    """Let host memory of rings pass for a device's, with engines that move it and checksums from there."""

    def memory(move: RingMove) -> DeviceMemory:
        ring = move.ring
        nbytes = ring._bytes.nbytes  # noqa: SLF001 - nobody else asks
        return DeviceMemory(0, ((ring.address, nbytes),), ring)

    def summer(_: staging.Ring, fragments: int, nbytes: int, pages: int) -> HostSummer:  # noqa: ARG001
        return HostSummer(fragments, nbytes)

    patch.setattr(RingMove, "memory", property(memory))
    patch.setattr(staging.Ring, "summer", summer)
    patch.setattr(staging, "_RINGS_OF_PROCESS", staging._Rings())  # noqa: SLF001 - none is lent yet
    stand_in_for_kvikio(patch)
    posix_for_gds(patch)


def short_steps(patch: pytest.MonkeyPatch, slots: int, nbytes: int, a_step: int = 1) -> None:
    """Let a ring have room for some slots of so many bytes, and a step take some."""
    patch.setattr(staging, "HALF_NBYTES", slots * nbytes // 2)
    patch.setattr("hicache_tier_storage.device_moves.LEAST_STEP_NBYTES", a_step * nbytes)


class Patient(PosixEngine):
    """Begins at once; ends the oldest step only when it is waited for, and notes how many were under way.

    Attributes
    ----------
    under_way : list
        Steps that were begun and not waited for.
    seen : list of int
        How many there were each time that one was waited for.
    """

    device_mode = "pretended"

    def __init__(self) -> None:
        super().__init__(direct=False, threads=1)
        self.under_way: list[object] = []
        self.seen: list[int] = []

    def start(self, batch: PageBatch, *, write: bool) -> Flight:
        """Begin to move pages."""
        flight = SimpleNamespace(done=lambda: False)

        def result() -> list[str]:
            self.seen.append(len(self.under_way))
            self.under_way.remove(flight)
            return self.write(batch) if write else self.read(batch)

        flight.result = result
        self.under_way.append(flight)
        return flight
