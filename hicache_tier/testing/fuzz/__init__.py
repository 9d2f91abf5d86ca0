"""Fuzzing of everything that reads bytes which others may have written.

`scripts/fuzz.py --seconds 600` fuzzes on; what it finds becomes a file in `tests/fuzz/corpus`, for CI.
"""

from __future__ import annotations

from .target import Target, targets

__all__ = ["Target", "targets"]
