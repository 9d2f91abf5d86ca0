"""SGLang's caches on stores of this project.

`HiCacheTierStorage` is below HiCache: `--hicache-storage-backend dynamic`. `HiCacheTierLinker` is below the
device pools: `--unified-cache-external-linker-backend dynamic`. Both need `sglang` and are imported when they
are asked for; all that they are made of does without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .linker import HiCacheTierLinker
    from .storage import HiCacheTierStorage

__all__ = ["HiCacheTierLinker", "HiCacheTierStorage"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever a module has
    """Import an adapter on first use."""
    if name == "HiCacheTierStorage":
        from .storage import HiCacheTierStorage

        return HiCacheTierStorage
    if name == "HiCacheTierLinker":
        from .linker import HiCacheTierLinker

        return HiCacheTierLinker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
