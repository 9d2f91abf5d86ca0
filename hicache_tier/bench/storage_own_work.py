"""The store's own work: book-keeping without bytes, and opening a store of many pages."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool
from hicache_tier_storage import PageStore, open_store

from .errors import BenchError
from .storage_cases import StorageCase
from .storage_pages import make_keys

if TYPE_CHECKING:
    from hicache_tier_storage import PageBatch

_BATCH = 128


class NoBytes:
    """A byte engine that moves nothing, so that what is left is the store's own work."""

    name = "none"
    mode = "none"

    def write(self, batch: PageBatch) -> list[str]:
        """Pretend."""
        return [""] * len(batch)

    read = write

    def close(self) -> None:
        """Nothing to do."""


def bookkeeping(root: Path, repeats: int) -> dict[str, float]:
    """Measure the CPU time a page of all threads of a store, and look-ups a second, in batches of 128."""
    geometry = StorageCase(1, 64 << 10).geometry
    count = 16 * _BATCH
    host = HostPool(geometry, layout="page_first", num_pages=_BATCH)
    keys = make_keys("book", count)
    folder = Path(tempfile.mkdtemp(prefix="hct-bench-", dir=root))
    capacity = 4 * count * geometry.page_nbytes
    try:
        with open_store(
            folder / "store",
            geometry,
            "page_first",
            capacity_bytes=capacity,
            engine=NoBytes(),
            checksums=False,
        ) as store:
            return _own_work(store, host, keys, repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _own_work(store: PageStore, host: HostPool, keys: list[bytes], repeats: int) -> dict[str, float]:
    batches = [keys[at : at + _BATCH] for at in range(0, len(keys), _BATCH)]
    pages = torch.arange(_BATCH)
    puts, gets, matches = [], [], []
    for _ in range(repeats + 1):
        store.clear()
        start = time.process_time()
        for batch in batches:
            store.put(batch, host, pages)
        puts.append((time.process_time() - start) / len(keys))
        start = time.process_time()
        for batch in batches:
            store.get(batch, host, pages)
        gets.append((time.process_time() - start) / len(keys))
        start = time.process_time()
        if store.match_prefix(keys) != len(keys):
            raise BenchError("match_prefix did not find what was put")
        matches.append(len(keys) / (time.process_time() - start))
    return {
        "put_us_per_page": median(puts[1:]) * 1e6,
        "get_us_per_page": median(gets[1:]) * 1e6,
        "match_keys_per_s": median(matches[1:]),
    }


def opening(root: Path, slots: int, repeats: int) -> dict[str, float]:
    """Measure opening a store whose slots are all committed."""
    geometry = KVGeometry.mla(num_layers=1, latent_dim=64, dtype="bfloat16", page_tokens=32)
    folder = Path(tempfile.mkdtemp(prefix="hct-bench-", dir=root))
    seconds = []
    # 4 KiB pages; the payload is never written, only their records
    capacity = (slots + (slots >> 3)) * (4096 + 16 + 128)
    try:
        with open_store(folder, geometry, "page_first", capacity_bytes=capacity, engine=NoBytes()) as store:
            host = HostPool(geometry, layout="page_first", num_pages=1)
            keys = make_keys("open", slots)
            zeros = np.zeros(4096, np.int64)
            for at in range(0, slots, 4096):
                part = keys[at : at + 4096]
                if not all(store.put(part, host, zeros[: len(part)])):
                    raise BenchError(f"put failed: {store.stats()['put']}")
        for _ in range(repeats):
            start = time.perf_counter()
            store = open_store(folder, geometry, "page_first", capacity_bytes=capacity, engine=NoBytes())
            seconds.append(time.perf_counter() - start)
            if len(store) != slots:
                raise BenchError(f"{len(store)} of {slots} pages were found again")
            store.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"slots": slots, "open_seconds": median(seconds)}
