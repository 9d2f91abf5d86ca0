"""Files that a benchmark writes at its end: what is wrong with them is told before it begins."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .errors import BenchError

if TYPE_CHECKING:
    from pathlib import Path


def check_report_file(path: Path, option: str) -> None:
    """Raise `BenchError` where a file cannot be written."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise BenchError(f"{option} {path}: {folder} is no folder.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise BenchError(f"{option} {path} cannot be written.")
