"""One trace through one store."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hicache_tier.host_pool import HostPool
from hicache_tier.tier import Tier, WritePolicy

from .device_cache import DeviceCache
from .replay_engine import ReplayEngine, Served
from .replay_meter import MeteredStore, StoreCall
from .replay_pages import KeyedPages, block_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout
    from hicache_tier.tier import StoreLike

    from .traces import Request

_POLL_S = 0.001
_PATIENCE_S = 30.0
_FLUSH_S = 120.0


@dataclass(frozen=True, slots=True)
class ReplayShape:
    """Sizes and policies that all stores of a run have in common.

    Attributes
    ----------
    geometry : KVGeometry
    layout : Layout
    device : torch.device
    pages_a_block : int
        Pages of the geometry that a block of the trace stands for.
    longest : int
        Pages of the longest prompt.
    device_pages : int
        Pages that stay on the device between requests; 0: none do.
    host_pages : int
    capacity_nbytes : int
        Of the store.
    policy, prefetch : str
    lookup_timeout_s : float
        As of `Tier`.
    speed : float
        How many times as fast as the trace; 0: as fast as the writes keep up.
    """

    geometry: KVGeometry
    layout: Layout
    device: torch.device
    pages_a_block: int
    longest: int
    device_pages: int
    host_pages: int
    capacity_nbytes: int
    policy: str
    prefetch: str
    lookup_timeout_s: float
    speed: float


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """What happened, as measured.

    Attributes
    ----------
    served : list of Served
        One a request.
    calls : list of StoreCall
    began_s : float
        Monotonic seconds at the start.
    seconds, held_s, flush_s : float
        From the first request to the end of the last; of these, waiting for writes to keep up; and writing
        out what was left.
    unsaved_pages : int
        Pages that were not in the store after that.
    stats : dict
        As of `Tier.stats`, after the flush.
    """

    served: list[Served]
    calls: list[StoreCall]
    began_s: float
    seconds: float
    held_s: float
    flush_s: float
    unsaved_pages: int
    stats: dict[str, Any]


def replay(
    requests: Sequence[Request], shape: ReplayShape, store: StoreLike, tick: Callable[[], None]
) -> ReplayOutcome:
    """Serve the requests of a trace through a tier over a store, which stays the caller's.

    Raises
    ------
    HiCacheTierError
        Where a pool cannot be had.
    """
    metered = MeteredStore(store)
    resident = max(shape.device_pages, shape.longest)
    pages = KeyedPages(shape.geometry, resident, shape.device)
    cache = DeviceCache(resident, keeps=shape.device_pages > 0)
    with (
        _one_thread(),
        HostPool(shape.geometry, shape.layout, shape.host_pages) as host,
        Tier(
            host,
            metered,
            policy=shape.policy,
            prefetch=shape.prefetch,
            lookup_timeout_s=shape.lookup_timeout_s,
            write_back_reserve_pages=max(shape.longest, shape.host_pages // 8),
        ) as tier,
    ):
        engine = ReplayEngine(tier, pages, cache)
        clock = _Clock(requests[0].timestamp_ms, shape.speed, tier, shape.longest)
        served = []
        for request in requests:
            clock.wait_for(request)
            served.append(engine.serve(block_keys(request.blocks, shape.pages_a_block)))
            tick()
        seconds = time.monotonic() - clock.began_s
        unsaved = tier.flush(_FLUSH_S)
        flush_s = time.monotonic() - clock.began_s - seconds
        stats = tier.stats()
    return ReplayOutcome(served, metered.calls, clock.began_s, seconds, clock.held_s, flush_s, unsaved, stats)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have torch copy in the calling thread alone.

    Its threads spin while they wait for each other. Where the store's threads, or anybody else's, want the
    cores too, that made a replay on two cores four times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Clock:
    """When the next request may begin: at its time, or when the writes have kept up."""

    def __init__(self, first_ms: int, speed: float, tier: Tier, longest: int) -> None:
        self.began_s = time.monotonic()
        self.held_s = 0.0
        self._first_ms = first_ms
        self._speed = speed
        self._tier = tier
        # With so much room the longest prompt is queued without an older write being dropped. What is written
        # back is on its way out: until it has gone its pages are not free.
        writes_back = tier.settings.policy is WritePolicy.WRITE_BACK
        self._most_pages = 0 if writes_back else max(0, tier.settings.write_queue_pages - longest)

    def wait_for(self, request: Request) -> None:
        """Wait for the time of a request, or, as fast as possible, until its writes would find room."""
        if self._speed:
            due_s = self.began_s + (request.timestamp_ms - self._first_ms) / 1e3 / self._speed
            time.sleep(min(max(0.0, due_s - time.monotonic()), threading.TIMEOUT_MAX))
            return
        began_s = time.monotonic()
        while (
            self._waiting_pages() > self._most_pages
            and time.monotonic() - began_s < _PATIENCE_S  # a store that hangs must not hang the replay
        ):
            time.sleep(_POLL_S)
        self.held_s += time.monotonic() - began_s

    def _waiting_pages(self) -> int:
        queues = self._tier.stats()["queues"]
        return int(queues["write_pages"] + queues["write_in_flight_pages"])
