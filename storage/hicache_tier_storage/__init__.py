"""Slab store: KV pages on disk as ordinary Zarr v3 groups, written and read without Zarr."""

from __future__ import annotations

from .engine import ByteEngine, PageBatch
from .opening import open_store
from .status import PageStatus
from .store import HostPages, PageStore

__all__ = ["ByteEngine", "HostPages", "PageBatch", "PageStatus", "PageStore", "open_store"]
