"""Pictures need matplotlib."""

from __future__ import annotations

from .errors import BenchError


def check_plotting() -> None:
    """Raise `BenchError` naming the extra where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise BenchError(
            "--plot needs matplotlib, which is not installed. Use: pip install 'hicache-tier[plot]'."
        ) from error
    mpl.use("agg")
