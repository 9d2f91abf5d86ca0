"""A root, and short words for what tests do with the slab stores in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_tier.geometry import KVGeometry
from hicache_tier_storage import PageStore, open_store

from .array_pool import ArrayPool, blank_pages, fill_pages, pages_equal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hicache_tier_storage.partition_files import PartitionPaths
    from hicache_tier_storage.writer import WriterPartition

GEOMETRY = KVGeometry.mha(num_layers=2, num_kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=8)
PAGE_NBYTES = GEOMETRY.page_nbytes  # 8192
CAPACITY_NBYTES = 2 << 20  # 15 slabs of 16 pages


class StoreRig:
    """Stores of `GEOMETRY` in one root; every page's bytes follow from its key, so any mix-up is seen.

    Parameters
    ----------
    root : Path
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.host = ArrayPool(GEOMETRY, "page_first", 512)
        self._stores: list[PageStore] = []

    def open(self, **options: Any) -> PageStore:  # noqa: ANN401 - as of open_store
        """Open a store; it is closed with the rig."""
        defaults: dict[str, Any] = {"model": "m", "capacity_bytes": CAPACITY_NBYTES, "threads": 2}
        defaults |= {"io_mode": "buffered"} | options
        store = open_store(self.root, GEOMETRY, defaults.pop("layout", "page_first"), **defaults)
        self._stores.append(store)
        return store

    def put(self, store: PageStore, keys: Sequence[bytes], **options: Any) -> list[str]:  # noqa: ANN401
        """Store the pages of keys; return the reasons."""
        host = ArrayPool(GEOMETRY, store.layout, max(1, len(keys)))
        fill_pages(host, range(len(keys)), keys, PAGE_NBYTES)
        return [status.reason for status in store.put(keys, host, range(len(keys)), **options)]

    def chain(self, store: PageStore, keys: Sequence[bytes]) -> list[str]:
        """Store keys as one chain, each page the parent of the next."""
        return self.put(store, keys, parents=[None, *keys[:-1]])

    def get(self, store: PageStore, keys: Sequence[bytes]) -> list[str]:
        """Load pages; return the reasons. A page said to be loaded holds the bytes of its key."""
        host = ArrayPool(GEOMETRY, store.layout, max(1, len(keys)))
        blank_pages(host, range(len(keys)), PAGE_NBYTES)
        status = store.get(keys, host, range(len(keys)))
        equal = pages_equal(host, range(len(keys)), keys, PAGE_NBYTES)
        assert all(same for same, verdict in zip(equal, status, strict=True) if verdict), "wrong bytes"
        return [verdict.reason for verdict in status]

    def close(self) -> None:
        """Close all stores."""
        for store in self._stores:
            store.close(5)


def writer_of(store: PageStore) -> WriterPartition:
    """Return a store's own partition."""
    writer = store._core.writer  # noqa: SLF001 - tests look inside
    assert writer is not None
    return writer


def paths_of(store: PageStore) -> PartitionPaths:
    """Return where a store's own partition lies."""
    return writer_of(store).paths


def slab_of(store: PageStore, number: int = 0) -> Path:
    """Return the path of a slab."""
    return paths_of(store).slab(number, writer_of(store).facts.page_axes)


def slot_of(store: PageStore, key: bytes) -> tuple[int, int]:
    """Return slab number and slot within it of a page."""
    slot = store._core.index[key]  # noqa: SLF001 - tests look inside
    return divmod(slot, writer_of(store).facts.shape.slots)


def tree(root: Path) -> dict[str, tuple[int, bytes, int]]:
    """Return mode, content and time of change of everything under a directory, to compare."""
    found = {}
    for path in sorted(root.rglob("*")):
        stat = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path.relative_to(root))] = (stat.st_mode, content, stat.st_mtime_ns)
    return found
