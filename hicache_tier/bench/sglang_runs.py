"""What `hicache-tier bench sglang` measures, on SGLang's own host pools and controllers."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from contextlib import contextmanager, suppress
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.integrations.sglang.memory import CallPages
from hicache_tier.integrations.sglang.names import names_of
from hicache_tier_storage.calls import Lane

from .timing import Contestant, ratio, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

BATCH_PAGES = 128  # as SGLang's controller cuts its transfers
_PAGE_TOKENS = 16


def host_pool(page_nbytes: int, pages: int, layout: str) -> Any:  # noqa: ANN401 - SGLang's MHA host pool
    """Return one of SGLang's host pools with pages of about this size: as many layers of 2 heads as fit."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _mha_host_inputs
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    layers = max(1, page_nbytes // (2 * _PAGE_TOKENS * 2 * 64 * 2))
    device = MHATokenToKVPool(
        size=_PAGE_TOKENS,
        page_size=_PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=64,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    cls, info, options = _mha_host_inputs(device)
    options["device_capacity_tokens"] = pages * _PAGE_TOKENS
    pool = cls(info, 1.0, 0, _PAGE_TOKENS, layout, pin_memory=False, **options)
    pool.kv_buffer.view(torch.uint8).reshape(-1)[:] = 1  # every page of it is there
    return pool


def storage_at(root: Path, pool: Any, **options: Any) -> Any:  # noqa: ANN401 - the adapter
    """Return the adapter over a root, with the pool registered as SGLang does it."""
    from hicache_tier.integrations.sglang import HiCacheTierStorage

    storage = HiCacheTierStorage(configuration({"root": str(root), "metrics": False, **options}), {})
    storage.register_mem_pool_host(pool)
    storage.register_mem_host_pool_v2(pool, "kv")
    storage.on_host_pools_registered()
    return storage


def configuration(extra: dict[str, Any]) -> Any:  # noqa: ANN401 - HiCacheStorageConfig
    """Return SGLang's storage configuration of a single rank."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="bench",
        extra_config=extra,
    )


def keys_of(count: int) -> list[str]:
    """Return keys as SGLang makes them."""
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in range(count)]


@contextmanager
def spinning() -> Iterator[None]:
    """Let a Python thread spin beside the work, as a busy scheduler does."""
    over = threading.Event()

    def spin() -> None:
        while not over.is_set():
            pass

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def overhead(root: Path, page_nbytes: int, repeats: int) -> dict[str, Any]:
    """Measure a call of the adapter against the store's own call for the same pages of the same pool.

    Returns
    -------
    dict
        `page_nbytes`, and microseconds a page beyond the store, medians over the turns: `get_us`, `set_us`
        (pages that are stored already, so that no disk is in it); `exists_us` in all. What the machine has
        to do with it, of the same turns: `store_get_us`, the store's own get; `hop_us`, an empty call on
        another thread and back, by the pages of a batch.
    """
    pool = host_pool(page_nbytes, 2 * BATCH_PAGES, "page_first")
    storage = storage_at(
        root, pool, capacity_bytes=4 * BATCH_PAGES * max(4096, page_nbytes), io_mode="buffered"
    )
    keys, names = keys_of(BATCH_PAGES), names_of(keys_of(BATCH_PAGES))
    slots = torch.arange(BATCH_PAGES * _PAGE_TOKENS, dtype=torch.int64)
    numbers = np.arange(BATCH_PAGES)
    ours = storage.desk.pools["kv"]
    plain = _Plain(ours.view)
    parents = [None, *names[:-1]]
    if not all(storage.batch_set_v1(keys, slots)):
        raise InvalidArgumentError(f"the pages could not be stored in {root}.")
    calls, lane = 20, Lane("bench", 8)
    contestants = [
        Contestant("get", lambda: _times(calls, storage.batch_get_v1, keys, slots)),
        Contestant("store get", lambda: _times(calls, ours.store.get, names, plain, numbers)),
        Contestant("set", lambda: _times(calls, storage.batch_set_v1, keys, slots)),
        Contestant(
            "store put", lambda: _times(calls, ours.store.put, names, plain, numbers, parents=parents)
        ),
        Contestant("exists", lambda: _times(calls, storage.batch_exists, keys)),
        Contestant("hop", lambda: _times(calls, _hop, lane)),
    ]
    samples = take_turns(contestants, repeats)
    lane.close()
    storage.close()
    pages = calls * BATCH_PAGES

    def beyond(adapter: str, store: str) -> float:
        turns = zip(samples[adapter].wall, samples[store].wall, strict=True)
        return 1e6 * median(a - b for a, b in turns) / pages

    return {
        "page_nbytes": ours.view.geometry.page_nbytes,
        "get_us": beyond("get", "store get"),
        "set_us": beyond("set", "store put"),
        "exists_us": 1e6 * samples["exists"].seconds / pages,
        "store_get_us": 1e6 * samples["store get"].seconds / pages,
        "hop_us": 1e6 * samples["hop"].seconds / pages,
    }


def _times(count: int, call: Any, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
    for _ in range(count):
        call(*arguments, **options)


def _hop(lane: Lane) -> None:
    """Have another thread do nothing, and wait for it."""
    call = lane.start(lambda: None)
    if call is None or not call.wait(time.monotonic() + 60.0):
        raise InvalidArgumentError("no thread could be had.")


class _Plain:
    """A pool's pages without a lease: how the store is used by itself."""

    def __init__(self, view: Any) -> None:  # noqa: ANN401 - PoolView
        self.geometry, self.layout, self._view = view.geometry, view.layout, view

    def segment_table(self, pages: Any) -> tuple[Any, Any]:  # noqa: ANN401 - int64 [n]
        """Where pages lie."""
        return self._view.addresses(np.asarray(pages)), self._view.nbytes

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Do nothing."""
        yield


def prefetch(
    folder: Path, page_nbytes: int, total_nbytes: int, *, io_mode: str, layout: str, repeats: int
) -> dict[str, Any]:
    """Measure a prefetch beside a spinning thread: adapter, store alone, SGLang's file backend, in turn.

    Returns
    -------
    dict
        Seconds of each, medians over the turns, and the ratios `to_file` and `to_store`.
    """
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    pages = max(1, total_nbytes // page_nbytes)
    pool = host_pool(page_nbytes, pages, layout)
    storage = storage_at(
        folder / "store", pool, capacity_bytes=2 * total_nbytes + (64 << 20), io_mode=io_mode, deadline_s=4.0
    )
    file = HiCacheFile(configuration({}), str(folder / "file"))
    keys = keys_of(pages)
    slots = torch.arange(pages * _PAGE_TOKENS, dtype=torch.int64)
    raw = pool.kv_buffer.view(torch.uint8).reshape(-1).numpy()
    _fill(raw)
    wanted = _digest(pool, pages)
    batches = [(at, min(at + BATCH_PAGES, pages)) for at in range(0, pages, BATCH_PAGES)]
    for first, last in batches:
        part = slots[first * _PAGE_TOKENS : last * _PAGE_TOKENS]
        if not all(storage.batch_set_v1(keys[first:last], part)):
            raise InvalidArgumentError(f"the pages could not be stored in {folder}.")
    for page, key in enumerate(keys):
        file.set(key, pool.get_data_page(page * _PAGE_TOKENS))
    operation = SimpleNamespace(request_id="bench", is_terminated=lambda: False)
    ours = storage.desk.pools["kv"]
    plain = _Plain(ours.view)

    def through(get: Any, backend: Any) -> int:  # noqa: ANN401
        controller = SimpleNamespace(storage_host_pool=pool, storage_backend=backend, page_size=_PAGE_TOKENS)
        loaded = 0
        for first, last in batches:
            part = slots[first * _PAGE_TOKENS : last * _PAGE_TOKENS]
            loaded += get(controller, operation, keys[first:last], part)
        return loaded

    def by_store() -> int:
        names = names_of(keys)
        return sum(
            sum(ours.store.get(names[first:last], plain, np.arange(first, last))) for first, last in batches
        )

    ways: dict[str, Callable[[], int]] = {
        "adapter": lambda: through(HiCacheController._page_get_zero_copy, storage),  # noqa: SLF001
        "store": by_store,
        "file": lambda: through(HiCacheController._generic_page_get, file),  # noqa: SLF001
    }
    for name, way in ways.items():  # bytes first
        raw[:] = 0
        if way() != pages or _digest(pool, pages) != wanted:
            raise InvalidArgumentError(f"{name} brought other bytes, or not all of them.")
    turns = {name: Contestant(name, _discarding(way)) for name, way in ways.items()}
    with spinning():
        near = take_turns([turns["store"], turns["adapter"]], 3 * repeats)
        far = take_turns([turns["file"], turns["adapter"]], max(2, repeats // 2))
    storage.close()
    with suppress(OSError):
        shutil.rmtree(folder / "file")
    return {
        "page_nbytes": ours.view.geometry.page_nbytes,
        "pages": pages,
        "io_mode": io_mode,
        "layout": layout,
        "adapter_s": near["adapter"].seconds,
        "store_s": near["store"].seconds,
        "file_s": far["file"].seconds,
        "to_file": ratio(far["adapter"].wall, far["file"].wall),
        "to_store": ratio(near["adapter"].wall, near["store"].wall),
    }


def _digest(pool: Any, pages: int) -> bytes:  # noqa: ANN401
    """Return a digest over pages, as SGLang flattens them."""
    digest = hashlib.blake2b()
    for page in range(pages):
        digest.update(pool.get_data_page(page * _PAGE_TOKENS).view(torch.uint8).numpy())
    return digest.digest()


def _discarding(way: Any) -> Any:  # noqa: ANN401
    def run() -> None:
        way()

    return run


def _fill(raw: Any) -> None:  # noqa: ANN401 - uint8 [n]
    generator = np.random.default_rng(1)
    step = 64 << 20
    for at in range(0, len(raw), step):
        part = raw[at : at + step]
        part[:] = np.frombuffer(generator.bytes(len(part)), np.uint8)


def attach(root: Path, pages: int) -> dict[str, Any]:
    """Measure attaching to a store of many pages: construction, registration, the first lookup.

    Returns
    -------
    dict
        `pages`, `attach_s`.
    """
    pool = host_pool(4096, 4096, "page_first")
    capacity = (pages + 65536) * 16384
    storage = storage_at(root, pool, capacity_bytes=capacity, io_mode="buffered", deadline_s=4.0)
    ours = storage.desk.pools["kv"]
    blank = np.zeros(ours.view.geometry.page_nbytes, np.uint8)
    step = 4096
    memory = CallPages(
        ours.view.geometry,
        ours.view.layout,
        np.full((step, 1), blank.ctypes.data, np.int64).__getitem__,
        np.array([len(blank)], np.int64),
        keep=blank,
    )
    keys: Sequence[str] = keys_of(pages)
    for first in range(0, pages, step):
        part = names_of(keys[first : first + step])
        if not all(ours.store.put(part, memory, range(len(part)))):
            raise InvalidArgumentError(f"{pages} pages could not be stored in {root}.")
    storage.close()
    started_s = time.perf_counter()
    storage = storage_at(root, pool, capacity_bytes=capacity, io_mode="buffered", deadline_s=4.0)
    found = storage.batch_exists(list(keys[:BATCH_PAGES]))
    seconds = time.perf_counter() - started_s
    storage.close()
    if found != BATCH_PAGES:
        raise InvalidArgumentError(f"{found} of {BATCH_PAGES} pages were found again.")
    return {"pages": pages, "attach_s": seconds}
