"""Engines for memory of a device where host memory stands for it.

kvikio is a stand-in; NIXL is real, with its POSIX plug-in in place of GDS_MT.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hicache_tier_storage import kvikio_engine, nixl_engine
from hicache_tier_storage.kvikio_engine import KvikioEngine
from hicache_tier_storage.nixl_engine import NixlEngine
from hicache_tier_storage.nixl_lane import posix_plugin

from .kvikio_stand_in import CuFile

if TYPE_CHECKING:
    import pytest

    from hicache_tier_storage.engine import ByteEngine


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
