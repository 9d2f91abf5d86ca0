"""An engine on a medium that is slow, fails, tears and lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_tier.testing.faults import (
    Delay,
    Fail,
    FailPages,
    FaultyEngine,
    FlipBits,
    ReturnShort,
    TearWrites,
    coming_in,
    every,
    going_out,
)
from hicache_tier_storage.posix import PosixEngine

if TYPE_CHECKING:
    from hicache_tier_storage import ByteEngine

_HANGS_S = 1.5  # beyond the deadline of those who use it


def bad_engine(threads: int, seed: int) -> ByteEngine:
    """Return one; what it does to a page is by chance, alike for a seed."""
    return FaultyEngine(
        PosixEngine(direct=False, threads=threads),
        Delay(0.005, every(31)),
        Delay(_HANGS_S, every(307)),
        Fail("io_error: tortured", every(211)),
        Fail(RuntimeError("tortured"), every(503)),
        FailPages("io_error: tortured", 0.02, every(5), seed=seed),
        FlipBits(0.05, every(7, coming_in), seed=seed),
        ReturnShort(1000, every(101, coming_in)),
        TearWrites(1000, every(41, going_out), silent=True),
    )
