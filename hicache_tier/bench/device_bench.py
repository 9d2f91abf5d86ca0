"""The device route of the store: pages of a GPU to slots and back, against other ways for the same bytes."""

from __future__ import annotations

import os
import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from hicache_tier.device_pool import DevicePool
from hicache_tier.host_pool import HostPool
from hicache_tier.transfer import backup, load
from hicache_tier_storage import open_store
from hicache_tier_storage.flights import Settled
from hicache_tier_storage.kvikio_package import use_threads, why_no_kvikio
from hicache_tier_storage.staging import waited_s

from .errors import BenchError
from .large_file import LargeFile, use
from .page_cache import MOST_RESIDENT, resident_share
from .storage_pages import make_keys
from .storage_rig import StorageRig
from .timing import Contestant, Samples, ratio, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hicache_tier_storage import PageStore

    from .peers import PeerKind
    from .storage_cases import StorageShape

_BATCH = 128
_ONE_FILE = (
    "one_file_gb_s",
    "one_file_threads",
    "ratio_to_one_file",
    "in_memory_share",
    "one_file_in_memory_share",
)


def modes_for_devices(engine: str, probed: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the probe that say whether an engine's device route can be measured."""
    name = f"gpu-{engine}"
    if not torch.cuda.is_available():
        return [_row(name, "GPU memory", "no CUDA device")]
    if engine == "posix":
        return [_row(name, "staged in host memory", "")]
    modes = ("GPU memory", "GDS")
    rows = [row for row in probed if row["engine"] == engine and row["mode"].startswith(modes)]
    return [row | {"engine": name} for row in rows]


def _row(engine: str, mode: str, why: str) -> dict[str, Any]:
    return {"engine": engine, "mode": mode, "usable": not why, "reason": why, "chosen": False}


class DeviceBench:
    """Rows of one shape by the device route of one byte engine; see `storage_sources.RowBench`.

    They have besides: `device_mode`; `host_route_gb_s` and `ratio_to_host_route` (backup to a pinned host
    pool, then put by `posix`; the way back for get); `one_file_gb_s`, `one_file_threads` and
    `ratio_to_one_file` (kvikio's best on one large file of the same size, None where it is not installed);
    `in_memory_share` and `one_file_in_memory_share` (of the bytes, what the page cache holds afterwards: if
    one goes through it and the other does not, there is no ratio); `staging_share` (of the time, that a call
    waited for the device while none of its I/O was under way); and `submit_us_per_page` (what a put or get
    of 128 pages costs where the engine moves nothing).

    Parameters
    ----------
    root : Path
    shape : StorageShape
    engine : str
        `posix`, `nixl` or `kvikio`.
    """

    def __init__(self, root: Path, shape: StorageShape, engine: str) -> None:
        case = shape.case
        self._name, self._shape = f"gpu-{engine}", shape
        self._rig = StorageRig(root, shape)
        self._keys = make_keys("bench", case.pages)
        self._device = DevicePool.empty(case.geometry, 2 * case.pages, "cuda:0")
        _randomise(self._device)
        self._host = HostPool(case.geometry, shape.layout, case.pages)
        self._pages, self._spare = range(case.pages), range(case.pages, 2 * case.pages)
        self._options: dict[str, Any] = {
            "capacity_bytes": 8 * case.nbytes,
            "io_mode": shape.mode,
            "threads": shape.threads,
            "checksums": shape.checksums,
            "verify": "always",
        }
        stores = {"device": engine, "host": "posix"}
        try:
            self._store, self._host_store = (
                open_store(self._rig.folder / name, case.geometry, shape.layout, engine=kind, **self._options)
                for name, kind in stores.items()
            )
        except BaseException:
            self._rig.close()
            raise

    def check(self) -> None:
        """Store every page, load it elsewhere, compare every byte, on the device and by the host's route."""
        case = self._shape.case
        self._put()
        self._get(self._spare)
        for tensors in self._device.layers:
            for part in tensors if isinstance(tensors, tuple) else (tensors,):
                half = part.shape[0] // 2
                if not torch.equal(part[:half].view(torch.uint8), part[half:].view(torch.uint8)):
                    raise BenchError(f"the device route of {self._name} gave other bytes")
        self._answered(self._store, self._store.get(self._keys, self._host, self._pages))
        blank = DevicePool.empty(case.geometry, case.pages, "cuda:0")
        load(self._host, blank, self._pages, self._pages).wait()
        for ours, theirs in zip(self._device.layers, blank.layers, strict=True):
            for part, other in zip(ours, theirs, strict=True):
                if not torch.equal(part[: len(other)].view(torch.uint8), other.view(torch.uint8)):
                    raise BenchError(f"pages that {self._name} stored are others in host memory")

    def rows(self, repeats: int, mixes: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Time put and get against the bare loop, the host's route, and one large file."""
        del mixes  # of reads and writes at once: as for host memory
        rig = self._rig
        rig.put()
        bare = rig.bare(rig.slots(), range(self._shape.case.pages))
        waits: list[float] = []
        put = [
            Contestant("bare", rig.settled(bare.write, bare.paths)),
            Contestant("host", rig.settled(self._put_by_host, bare.paths), self._clear_host),
            Contestant("device", _watched(rig.settled(self._put, bare.paths), waits), self._ready),
        ]
        get = [
            Contestant("bare", bare.read, rig.dropping(bare.paths)),
            Contestant("host", self._get_by_host, lambda: rig.drop(self._slabs("host"))),
            Contestant("device", _watched(self._get, waits), self._ready_to_read),
        ]
        large = self._large_file()
        try:
            if large is not None:
                file = [large.path]
                ready = partial(use, large.write_threads)
                put.append(Contestant("one file", rig.settled(large.write, file), ready))
                ready = partial(use, large.read_threads)
                get.append(Contestant("one file", large.read, _both(ready, file, rig)))
            found = []
            for direction, contestants in (("put", put), ("get", get)):
                waits.clear()
                samples = take_turns(contestants, repeats)
                share = sum(waits[1:]) / sum(samples["device"].wall)
                found.append(self._row(direction, samples, share) | self._against(large, direction, samples))
        finally:
            bare.close()
            if large is not None:
                large.close()
        return found

    def against(self, kinds: Sequence[PeerKind], repeats: int) -> list[dict[str, Any]]:
        """No peers but those in the rows."""
        del kinds, repeats
        return []

    def close(self) -> None:
        """Remove everything that was written."""
        self._store.close()
        self._host_store.close()
        self._rig.close()

    def _put(self) -> None:
        self._all(self._store, lambda keys, at: self._store.put(keys, self._device, self._pages[at]))

    def _get(self, into: range | None = None) -> None:
        target = self._pages if into is None else into
        self._all(self._store, lambda keys, at: self._store.get(keys, self._device, target[at]))

    def _clear_host(self) -> None:
        self._host_store.clear()

    def _ready(self) -> None:
        self._store.clear()
        self._use_threads()

    def _ready_to_read(self) -> None:
        self._rig.drop(self._slabs("device"))
        self._use_threads()

    def _use_threads(self) -> None:
        """Give kvikio back the threads that the engine asks for."""
        if self._name.endswith("kvikio"):
            use_threads(self._shape.threads)

    def _slabs(self, store: str) -> list[Path]:
        return sorted((self._rig.folder / store).glob("*/*/*/pages/c.*"))

    def _put_by_host(self) -> None:
        backup(self._device, self._host, self._pages, self._pages).wait()
        store = self._host_store
        self._all(store, lambda keys, at: store.put(keys, self._host, self._pages[at]))

    def _get_by_host(self) -> None:
        store = self._host_store
        self._all(store, lambda keys, at: store.get(keys, self._host, self._pages[at]))
        load(self._host, self._device, self._pages, self._pages).wait()

    def _all(self, store: PageStore, call: Callable[[list[bytes], slice], Sequence[object]]) -> None:
        """Make calls of at most `depth` pages; any refusal ends the benchmark."""
        for start in range(0, self._shape.case.pages, self._shape.depth):
            at = slice(start, min(start + self._shape.depth, self._shape.case.pages))
            self._answered(store, call(self._keys[at], at))

    def _answered(self, store: PageStore, verdicts: Sequence[object]) -> None:
        if not all(verdicts):
            stats = store.stats()
            raise BenchError(f"{self._name}: put or get failed: {stats['put']}, {stats['get']}")

    def _large_file(self) -> LargeFile | None:
        """Return one file, and as many threads as kvikio is fastest with, if it can be had."""
        if why_no_kvikio():
            return None
        memory = torch.empty(self._shape.case.nbytes, dtype=torch.uint8, device=self._device.device)
        memory.random_(0, 256)
        torch.cuda.synchronize()
        large = LargeFile(self._rig.folder / "one-file", memory)
        large.tune(self._rig.dropping([large.path]))
        return large

    def _against(
        self, large: LargeFile | None, direction: str, samples: dict[str, Samples]
    ) -> dict[str, Any]:
        """Return how this route stands to kvikio's on one large file."""
        if large is None:
            return dict.fromkeys(_ONE_FILE)
        ours, one = samples["device"], samples["one file"]
        shares = resident_share(self._slabs("device")), resident_share([large.path])
        alike = (shares[0] > MOST_RESIDENT) == (shares[1] > MOST_RESIDENT)
        values = (
            self._shape.case.nbytes / one.seconds / 1e9,
            large.write_threads if direction == "put" else large.read_threads,
            ratio(ours.wall, one.wall) if alike else None,
            *shares,
        )
        return dict(zip(_ONE_FILE, values, strict=True))

    def _row(self, direction: str, samples: dict[str, Samples], share: float) -> dict[str, Any]:
        ours, bare, host = samples["device"], samples["bare"], samples["host"]
        count, nbytes = self._shape.case.pages, self._shape.case.nbytes
        return {
            "engine": self._name,
            "direction": direction,
            "read_percent": 100 if direction == "get" else 0,
            **self._shape.as_row(),
            "gb_s": nbytes / ours.seconds / 1e9,
            "bare_gb_s": nbytes / bare.seconds / 1e9,
            "ratio_to_bare": ratio(ours.wall, bare.wall),
            "cpu_us_per_page": ours.cpu_seconds / count * 1e6,
            "bare_cpu_us_per_page": bare.cpu_seconds / count * 1e6,
            "cpu_ratio_to_bare": 1 / ratio(ours.cpu, bare.cpu),
            "device_mode": self._store.stats()["device_mode"],
            "host_route_gb_s": nbytes / host.seconds / 1e9,
            "ratio_to_host_route": ratio(ours.wall, host.wall),
            "staging_share": share,
            "submit_us_per_page": self._submit_us(direction),
        }

    def _submit_us(self, direction: str) -> float:
        """Time put or get of 128 pages by an engine that moves nothing, gathering and checksums included."""
        case = self._shape.case
        count = min(_BATCH, case.pages)
        keys, folder = self._keys[:count], self._rig.folder / "nothing"
        times = []
        engine = _NothingOnDevice()
        options = self._options | {"verify": "suspect", "engine": engine}
        with open_store(folder, case.geometry, self._shape.layout, **options) as store:
            for _ in range(20):
                if direction == "put":
                    store.clear()
                else:
                    store.put(keys, self._device, self._pages[:count])
                call = store.put if direction == "put" else store.get
                start = time.perf_counter()
                call(keys, self._device, self._pages[:count])
                times.append(time.perf_counter() - start)
        return median(times) / count * 1e6


class _NothingOnDevice:
    """A byte engine that moves no memory of a device."""

    name = mode = device_mode = "none"

    def write(self, batch: Any) -> list[str]:  # noqa: ANN401 - a PageBatch
        """Pretend."""
        return [""] * len(batch)

    read = write

    def start(self, batch: Any, *, write: bool) -> Settled:  # noqa: ANN401, ARG002 - a PageBatch
        """Pretend."""
        return Settled([""] * len(batch))

    def close(self) -> None:
        """Nothing to do."""


def _both(ready: Callable[[], None], paths: Sequence[Path], rig: StorageRig) -> Callable[[], None]:
    def prepare() -> None:
        ready()
        rig.drop(paths)

    return prepare


def _watched(run: Callable[[], None], waits: list[float]) -> Callable[[], None]:
    """Note how long each turn waited for the device beside its I/O."""

    def watched() -> None:
        before = waited_s()
        run()
        waits.append(waited_s() - before)

    return watched


def _randomise(device: DevicePool) -> None:
    """Fill the first half of every tensor with random bytes, the second with zeros."""
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    for tensors in device.layers:
        for part in tensors if isinstance(tensors, tuple) else (tensors,):
            raw = part.view(torch.uint8)
            raw[: len(raw) // 2].random_(0, 256)
            raw[len(raw) // 2 :].zero_()
    torch.cuda.synchronize()
