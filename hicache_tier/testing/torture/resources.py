"""What a process holds that could be left behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path

_MEMORY = "/dev/shm"  # noqa: S108 - for folders with names that nobody can foretell


def held() -> tuple[int, int]:
    """Return how many descriptors and threads this process has."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()), threading.active_count()


def more(now: tuple[int, int], before: tuple[int, int]) -> int:
    """Return how many more there are now."""
    return sum(max(0, a - b) for a, b in zip(now, before, strict=True))


def memory_folder() -> str | None:
    """Return where files lie in memory; None where there is no such place."""
    return _MEMORY if os.access(_MEMORY, os.W_OK) else None
