"""Pictures need matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_tier.errors import how_to_get

from .errors import BenchError
from .report_file import check_report_file

if TYPE_CHECKING:
    from pathlib import Path


def check_plotting() -> None:
    """Raise `BenchError` naming the extra where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise BenchError(
            f"--plot needs matplotlib, which is not installed. Use: {how_to_get('plot')}."
        ) from error
    mpl.use("agg")


def check_picture(path: Path) -> None:
    """Raise `BenchError` where a picture cannot be drawn or written."""
    check_plotting()
    from matplotlib.figure import Figure

    known = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in known:
        raise BenchError(f"--plot {path}: {path.suffix} is no kind of picture. Known: {', '.join(known)}.")
    check_report_file(path, "--plot")
