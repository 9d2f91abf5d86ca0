"""The state of a tier as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core import Core
    from .reader import Reader
    from .writer import Writer


def snapshot(core: Core, reader: Reader, writer: Writer) -> dict[str, Any]:
    """Return counters by reason, and gauges, of one moment.

    Returns
    -------
    dict
        `host`: pages of the pool: `total_pages` = `free_pages` + `owned_pages` (the tier's) + `other_pages`;
        `owned_pages` = `ready_pages` + `filling_pages` + `detached_pages` (forgotten, yet still locked or
        with the store); `locks` held. `queues`: pages that wait or are with the store. `lanes`: by
        direction, threads, calls in flight, late ones among them, and the breaker. The rest are sums since
        the tier was made, in pages, bytes, seconds or calls, many by reason: `matches`, `misses`, `inserts`,
        `backup`, `load`, `prefetch`, `reads`, `writes`, `lookups`, `evictions`, `warming`.
    """
    with core.held():
        total, free = core.host.num_pages, core.host.free_pages
        index = core.index
        counters = core.counters.nested()
        return counters | {
            "policy": core.settings.policy.value,
            "host": counters.get("host", {})
            | {
                "total_pages": total,
                "free_pages": free,
                "owned_pages": core.owned_pages,
                "other_pages": total - free - core.owned_pages,
                "ready_pages": len(index) - index.filling_pages,
                "filling_pages": index.filling_pages,
                "detached_pages": index.detached_pages,
                "locks": len(core.locks),
            },
            "queues": {
                "write_pages": writer.pages,
                "write_in_flight_pages": writer.in_flight_pages,
                "read_pages": reader.pages,
                "prefetches": len(reader.active),
            },
            "lanes": {
                lane.name: {
                    "threads": lane.live_threads,
                    "calls_in_flight": len(lane.calls),
                    "late_calls": lane.late_calls,
                    "breaker": "open" if lane.breaker.is_open else "closed",
                    "breaker_opened": lane.breaker.times_opened,
                }
                for lane in core.lanes
            },
        }
