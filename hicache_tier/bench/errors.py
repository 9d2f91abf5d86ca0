"""Errors of benchmarks."""

from __future__ import annotations

from hicache_tier.errors import HiCacheTierError


class BenchError(HiCacheTierError, RuntimeError):
    """The benchmark refuses to give figures."""

    kind = "bench"
