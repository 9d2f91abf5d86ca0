"""SGLang's HiCache on stores of this project: `--hicache-storage-backend dynamic`.

The adapter needs `sglang` and is imported when it is asked for; all that it is made of does without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .storage import HiCacheTierStorage

__all__ = ["HiCacheTierStorage"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever a module has
    """Import the adapter on first use."""
    if name != "HiCacheTierStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .storage import HiCacheTierStorage

    return HiCacheTierStorage
