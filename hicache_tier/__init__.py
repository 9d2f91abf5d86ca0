"""Storage tier for LLM serving: GPU KV cache <-> pinned host pools <-> NVMe and object storage.

Names are imported on first use, so that tools which only read a store do not pay for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from hicache_tier_storage import PageStore, open_store

    from .device_pool import DevicePool
    from .dtypes import DType
    from .errors import HiCacheTierError, UnsupportedTransferError
    from .geometry import KVGeometry
    from .host_pool import HostPool
    from .keys import page_keys
    from .layout import Layout
    from .paths import select_path
    from .tier import Tier
    from .transfer import backup, load

_HOMES = {
    "DType": "hicache_tier.dtypes",
    "DevicePool": "hicache_tier.device_pool",
    "HiCacheTierError": "hicache_tier.errors",
    "HostPool": "hicache_tier.host_pool",
    "KVGeometry": "hicache_tier.geometry",
    "Layout": "hicache_tier.layout",
    "PageStore": "hicache_tier_storage",
    "Tier": "hicache_tier.tier",
    "UnsupportedTransferError": "hicache_tier.errors",
    "backup": "hicache_tier.transfer",
    "load": "hicache_tier.transfer",
    "open_store": "hicache_tier_storage",
    "page_keys": "hicache_tier.keys",
    "select_path": "hicache_tier.paths",
}

__all__ = [
    "DType",
    "DevicePool",
    "HiCacheTierError",
    "HostPool",
    "KVGeometry",
    "Layout",
    "PageStore",
    "Tier",
    "UnsupportedTransferError",
    "__version__",
    "backup",
    "load",
    "open_store",
    "page_keys",
    "select_path",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
