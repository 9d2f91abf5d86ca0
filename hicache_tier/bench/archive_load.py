"""What an export costs a server that writes to the store meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import suppress
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hicache_tier_storage import open_store
from hicache_tier_storage.archive.staging import StagedPages

from .errors import BenchError
from .storage_pages import make_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_tier_storage import PageStore

    from .archive_rig import ArchiveRig

_WINDOW_S = 2.0
_START_S = 20.0  # for a process to start and copy its first page
_PAGES = 32


def puts_while_exporting(rig: ArchiveRig, repeats: int, tick: Callable[[], None]) -> dict[str, Any]:
    """Measure puts as fast as they go, with and without exports of the same store by another process."""
    geometry = rig.geometry(1)
    rig.drop("live", "live-out")
    pages = np.zeros((_PAGES, geometry.page_nbytes), np.uint8)
    pages[:] = np.random.default_rng(0).integers(0, 256, geometry.page_nbytes, np.uint8)
    rates: dict[bool, list[float]] = {False: [], True: []}
    copied = 0
    with open_store(
        rig.path("live"), geometry, "page_first", model="live", capacity_bytes=4 * rig.nbytes
    ) as store:
        host = StagedPages(geometry, store.layout, pages)
        while not store.stats()["evictions"]:  # from here on every put replaces a page
            first = store.stats()["pages"]
            _put_for(store, host, _WINDOW_S / 10, first)
        for turn in range(2 * repeats):
            busy = turn % 2 == 1
            with _Exports(rig, busy=busy) as exports:
                began = time.perf_counter()
                put = _put_for(store, host, _WINDOW_S, (turn + 1) << 40)
                rates[busy].append(put * geometry.page_nbytes / (time.perf_counter() - began))
            if busy and not exports.nbytes:
                raise BenchError("nothing was exported while puts were measured")
            copied += exports.nbytes
            tick()
    slowed = median(1 - b / a for a, b in zip(rates[False], rates[True], strict=True))
    return {
        "what": "puts while another process exports",
        "gb_s": median(rates[True]) / 1e9,
        "alone_gb_s": median(rates[False]) / 1e9,
        "slowed_by": slowed,
        "export_gb_s": copied / repeats / _WINDOW_S / 1e9,
    }


def _put_for(store: PageStore, host: StagedPages, seconds: float, first: int) -> int:
    put, over = 0, time.perf_counter() + seconds
    while time.perf_counter() < over:
        keys = make_keys(f"live{first + put}", _PAGES)
        if not all(store.put(keys, host, range(_PAGES))):
            raise BenchError(f"put failed: {store.stats()['put']}")
        put += _PAGES
    return put


class _Exports:
    """Exports of the live store by another process, one after another, for as long as a block runs.

    Attributes
    ----------
    nbytes : int
        Bytes of pages that they have written, once the block has ended.
    """

    def __init__(self, rig: ArchiveRig, *, busy: bool) -> None:
        self.nbytes = 0
        self._rig = rig
        self._busy = busy
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        source, target = self._rig.path("live"), self._rig.path("live-out")
        while not self._over.is_set():
            command = [sys.executable, "-m", "hicache_tier", "export", str(source), str(target)]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
                while child.poll() is None:
                    if self._over.wait(0.02):
                        child.terminate()
                        break
            self.nbytes += self._written()
            self._rig.drop("live-out", "live-out.partial")

    def _written(self) -> int:
        """Bytes of pages that the export of this moment has written."""
        total = 0
        for name in ("live-out", "live-out.partial"):
            for pattern in ("pages/c.*", "*.shard"):
                with suppress(FileNotFoundError):  # a folder or file was renamed just now
                    total += sum(file.stat().st_size for file in self._rig.path(name).rglob(pattern))
        return total

    def __enter__(self) -> Self:
        if self._busy:
            self._thread.start()
            late = time.monotonic() + _START_S
            while not self._written() and time.monotonic() < late:
                time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._busy:
            self._thread.join()
