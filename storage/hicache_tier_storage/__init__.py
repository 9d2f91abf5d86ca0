"""Slab store: KV pages on disk as ordinary Zarr v3 groups, written and read without Zarr."""

from __future__ import annotations

from .bounded import DeadlineError
from .encryption import EncryptionKey
from .engine import ByteEngine, PageBatch
from .opening import open_store
from .payload import HostPages
from .pool_set import match_pools, usable_prefix
from .status import PageStatus
from .store import PageStore

__all__ = [
    "ByteEngine",
    "DeadlineError",
    "EncryptionKey",
    "HostPages",
    "PageBatch",
    "PageStatus",
    "PageStore",
    "match_pools",
    "open_store",
    "usable_prefix",
]
