"""Measurements of the store: payload throughput against peers, book-keeping, opening."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool
from hicache_tier_storage import PageStore, open_store
from hicache_tier_storage.capacity import partition_paths
from hicache_tier_storage.partition import PartitionFacts

from .errors import BenchError
from .peers import BareLoop, FileAPage, drop_cache, page_buffers
from .timing import Contestant, Samples, ratio, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_tier_storage import PageBatch

_BATCH = 128
_HEAD_DIM, _KV_HEADS, _PAGE_TOKENS = 128, 4, 8


@dataclass(frozen=True, slots=True)
class StorageCase:
    """One size of page: how many, and how many bytes each (a multiple of 64 KiB for bfloat16 pages)."""

    pages: int
    page_nbytes: int

    @property
    def geometry(self) -> KVGeometry:
        """An MHA geometry whose pages have this size."""
        layer_nbytes = 2 * _KV_HEADS * _HEAD_DIM * 2 * _PAGE_TOKENS
        layers, rest = divmod(self.page_nbytes, layer_nbytes)
        if rest or not layers:
            raise BenchError(f"page size {self.page_nbytes} is not a multiple of {layer_nbytes} bytes.")
        return KVGeometry.mha(
            num_layers=layers,
            num_kv_heads=_KV_HEADS,
            head_dim=_HEAD_DIM,
            dtype="bfloat16",
            page_tokens=_PAGE_TOKENS,
        )


def random_pool(geometry: KVGeometry, layout: str, pages: int) -> HostPool:
    """Return a host pool whose first half holds random bytes and whose second half is zero."""
    host = HostPool(geometry, layout=layout, num_pages=2 * pages)
    random = np.random.default_rng(20261129)
    for row in host.segments(range(pages)):
        for address, nbytes in row:
            ctypes.memmove(address, random.bytes(nbytes), nbytes)
    return host


def page_bytes(host: HostPool, page: int) -> bytes:
    """Copy one page out of a pool."""
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in host.segments([page])[0])


def make_keys(tag: str, count: int) -> list[bytes]:
    """Return distinct page keys."""
    return [hashlib.sha256(f"{tag}-{number}".encode()).digest() for number in range(count)]


class StorageBench:
    """Payload throughput of one case in one mode."""

    def __init__(
        self,
        root: Path,
        case: StorageCase,
        *,
        layout: str,
        mode: str,
        threads: int,
        checksums: bool,
        engine: str = "posix",
    ) -> None:
        self._case, self._mode, self._threads, self._checksums = case, mode, threads, checksums
        self._folder = Path(tempfile.mkdtemp(prefix="hct-bench-", dir=root))
        self._host = random_pool(case.geometry, layout, case.pages)
        self._keys = make_keys("bench", case.pages)
        self._pages = torch.arange(case.pages)
        self._store = open_store(
            self._folder / "store",
            case.geometry,
            layout=layout,
            capacity_bytes=8 * case.pages * case.page_nbytes,
            io_mode=mode,
            threads=threads,
            checksums=checksums,
            verify="always",
            engine=engine,
        )
        self._buffers = page_buffers(self._host, range(case.pages))

    def check(self) -> None:
        """Store every page, load it elsewhere, compare every byte; leaves the pages stored."""
        count = self._case.pages
        spare = torch.arange(count, 2 * count)
        if not all(self._store.put(self._keys, self._host, self._pages)):
            raise BenchError(f"put failed: {self._store.stats()['put']}")
        if not all(self._store.get(self._keys, self._host, spare)):
            raise BenchError(f"get failed: {self._store.stats()['get']}")
        for page in range(count):
            if page_bytes(self._host, page) != page_bytes(self._host, page + count):
                raise BenchError(f"page {page} came back with other bytes")

    def _put(self) -> None:
        if not all(self._store.put(self._keys, self._host, self._pages)):
            raise BenchError(f"put failed: {self._store.stats()['put']}")

    def _get(self) -> None:
        if not all(self._store.get(self._keys, self._host, self._pages)):
            raise BenchError(f"get failed: {self._store.stats()['get']}")

    def _clear(self) -> None:
        self._store.clear()

    def _places(self) -> list[tuple[Path, int]]:
        """Return file and offset of as many slots as there are pages, in slot order."""
        paths = next(partition_paths(self._folder / "store"))
        facts = PartitionFacts.read(paths)
        slots, stride = facts.shape.slots, facts.shape.stride
        return [
            (paths.slab(number // slots, facts.page_axes), number % slots * stride)
            for number in range(self._case.pages)
        ]

    def run(self, repeats: int, tick: Callable[[], None]) -> list[dict[str, Any]]:
        """Time put and get against the bare loop over the same slots."""
        bare = BareLoop(self._places(), self._buffers, direct=self._mode == "direct", threads=self._threads)
        try:
            put = take_turns(
                [Contestant("bare", bare.write), Contestant("store", self._put, self._clear)], repeats, tick
            )
            get = take_turns([Contestant("bare", bare.read), Contestant("store", self._get)], repeats, tick)
        finally:
            bare.close()
        return [self._row("put", put), self._row("get", get)]

    def _row(self, direction: str, samples: dict[str, Samples]) -> dict[str, Any]:
        ours, bare = samples["store"], samples["bare"]
        count, nbytes = self._case.pages, self._case.pages * self._case.page_nbytes
        return {
            "engine": self._store.stats()["engine"],
            "direction": direction,
            "page_nbytes": self._case.page_nbytes,
            "pages": count,
            "mode": self._mode,
            "checksums": self._checksums,
            "threads": self._threads,
            "gb_s": nbytes / ours.seconds / 1e9,
            "bare_gb_s": nbytes / bare.seconds / 1e9,
            "ratio_to_bare": ratio(ours.wall, bare.wall),
            "cpu_us_per_page": ours.cpu_seconds / count * 1e6,
            "bare_cpu_us_per_page": bare.cpu_seconds / count * 1e6,
            "cpu_ratio_to_bare": 1 / ratio(ours.cpu, bare.cpu),
        }

    def against_files(self, repeats: int, tick: Callable[[], None]) -> list[dict[str, Any]]:
        """Time put and cold get against one file a page."""
        files = FileAPage(self._folder / "files", self._buffers)
        slabs = sorted({path for path, _ in self._places()})
        write = take_turns(
            [Contestant("files", files.write, files.remove), Contestant("store", self._put, self._clear)],
            repeats,
            tick,
        )
        read = take_turns(
            [
                Contestant("files", files.read, files.drop_cache),
                Contestant("store", self._get, lambda: drop_cache(slabs)),
            ],
            repeats,
            tick,
        )
        nbytes = self._case.pages * self._case.page_nbytes
        return [
            {
                "peer": "file a page",
                "direction": direction,
                "page_nbytes": self._case.page_nbytes,
                "mode": self._mode,
                "checksums": self._checksums,
                "gb_s": nbytes / samples["store"].seconds / 1e9,
                "peer_gb_s": nbytes / samples["files"].seconds / 1e9,
                "ratio_to_peer": ratio(samples["store"].wall, samples["files"].wall),
            }
            for direction, samples in (("put", write), ("cold get", read))
        ]

    def close(self) -> None:
        """Remove everything that was written."""
        self._store.close()
        self._buffers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


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
    """Measure the store's own CPU time a page, and look-ups a second, in batches of 128."""
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
        start = time.thread_time()
        for batch in batches:
            store.put(batch, host, pages)
        puts.append((time.thread_time() - start) / len(keys))
        start = time.thread_time()
        for batch in batches:
            store.get(batch, host, pages)
        gets.append((time.thread_time() - start) / len(keys))
        start = time.thread_time()
        if store.match_prefix(keys) != len(keys):
            raise BenchError("match_prefix did not find what was put")
        matches.append(len(keys) / (time.thread_time() - start))
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
