"""What a tier may be told: policies, bounds and deadlines."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Self, TypedDict

from hicache_tier.errors import InvalidArgumentError, not_known
from hicache_tier.geometry import positive
from hicache_tier.named import Named

if TYPE_CHECKING:
    from hicache_tier.host_pool import HostPool

    from .store import StoreLike


class WritePolicy(Named):
    """When a page of the host tier is written to the store."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"

    @classmethod
    def _noun(cls) -> str:
        return "policy"


class PrefetchPolicy(Named):
    """How long `Prefetch.wait` waits for pages that are still coming."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"

    @classmethod
    def _noun(cls) -> str:
        return "prefetch"


class TierOptions(TypedDict, total=False):
    """Keyword options of `Tier`; `Settings` tells what each means, its unit and its default."""

    policy: str | WritePolicy
    prefetch: str | PrefetchPolicy
    hits_to_store: int
    batch_pages: int
    write_queue_pages: int | None
    read_queue_pages: int | None
    write_back_reserve_pages: int | None
    write_yield_s: float
    prefetch_timeout_s: float
    lookup_timeout_s: float
    deadline_s: float
    probe_interval_s: float
    max_stuck_threads: int
    io_backend: str
    sharded: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of a tier, checked; a frozen value that the tier never changes.

    Attributes
    ----------
    policy : WritePolicy
        `write_through` (default): a page is queued for the store as soon as it is in the host tier.
        `write_through_selective`: when it has been asked for `hits_to_store` times.
        `write_back`: when it leaves the host tier, and at `flush` and `close`.
    prefetch : PrefetchPolicy
        `best_effort` (default): `wait` takes what has arrived and stops the rest. `wait_complete`: `wait`
        returns when everything has arrived or failed. `timeout`: the same, `prefetch_timeout_s` at most.
    hits_to_store : int
        For `write_through_selective`: the insertion is the first hit; each load, and each insertion that
        finds the page there, is one more. 2 by default.
    batch_pages : int
        Pages a call of the store moves at most; bounds how long a call takes. 128 by default.
    write_queue_pages, read_queue_pages : int or None
        Pages that may wait for the store. None: half the host pool for writes, the whole pool for reads.
    write_back_reserve_pages : int or None
        For `write_back`: pages kept free by writing back the least recently used ones ahead of need, so
        that an insertion finds room without waiting. None: an eighth of the host pool.
    write_yield_s : float
        Seconds that a write batch lets waiting reads go first, at most. 0.05 by default.
    prefetch_timeout_s : float
        For the prefetch policy `timeout`, counted from the start of the prefetch. 1 by default.
    lookup_timeout_s : float
        Seconds that `match` waits for the store to say what it has. 0.1 by default.
    deadline_s : float
        Seconds after which a call of the store counts as hung: its pages stay owned until it returns, the
        work it stood for is given up, and the breaker opens. 5 by default.
    probe_interval_s : float
        Seconds until an open breaker lets one call through to see whether the store is back; doubled after
        each that fails, up to 32 times this. 1 by default.
    max_stuck_threads : int
        Hung calls for which a direction gets a replacement thread; with more, that direction rests until
        one returns. 4 by default.
    io_backend : str
        `auto` (default), `kernel` or `direct`, see `select_path`.
    sharded : bool or None
        Whether device pools are layer-sharded. None: as the host pool is.
    """

    policy: WritePolicy
    prefetch: PrefetchPolicy
    hits_to_store: int
    batch_pages: int
    write_queue_pages: int
    read_queue_pages: int
    write_back_reserve_pages: int
    write_yield_s: float
    prefetch_timeout_s: float
    lookup_timeout_s: float
    deadline_s: float
    probe_interval_s: float
    max_stuck_threads: int
    io_backend: str
    sharded: bool | None

    @classmethod
    def parse(cls, options: TierOptions, num_pages: int) -> Self:
        """Check `options` for a host pool of `num_pages` pages and fill in what was left out.

        Raises
        ------
        InvalidArgumentError
            An unknown option or policy, or a number out of range.
        """
        unknown = sorted(set(options) - set(TierOptions.__annotations__))
        if unknown:
            raise not_known("option", unknown[0], tuple(TierOptions.__annotations__))

        def pages(name: str, value: int | None, default: int) -> int:
            return max(1, default) if value is None else positive(name, value)

        reserve = pages("write_back_reserve_pages", options.get("write_back_reserve_pages"), num_pages // 8)
        if reserve >= num_pages > 1:
            raise InvalidArgumentError(
                f"write_back_reserve_pages must be below the host pool's {num_pages} pages, got {reserve}."
            )
        return cls(
            policy=WritePolicy.parse(options.get("policy", WritePolicy.WRITE_THROUGH)),
            prefetch=PrefetchPolicy.parse(options.get("prefetch", PrefetchPolicy.BEST_EFFORT)),
            hits_to_store=positive("hits_to_store", options.get("hits_to_store", 2)),
            batch_pages=positive("batch_pages", options.get("batch_pages", 128)),
            write_queue_pages=pages("write_queue_pages", options.get("write_queue_pages"), num_pages // 2),
            read_queue_pages=pages("read_queue_pages", options.get("read_queue_pages"), num_pages),
            write_back_reserve_pages=reserve,
            write_yield_s=seconds("write_yield_s", options.get("write_yield_s", 0.05), zero=True),
            prefetch_timeout_s=seconds(
                "prefetch_timeout_s", options.get("prefetch_timeout_s", 1.0), zero=True
            ),
            lookup_timeout_s=seconds("lookup_timeout_s", options.get("lookup_timeout_s", 0.1)),
            deadline_s=seconds("deadline_s", options.get("deadline_s", 5.0)),
            probe_interval_s=seconds("probe_interval_s", options.get("probe_interval_s", 1.0)),
            max_stuck_threads=positive("max_stuck_threads", options.get("max_stuck_threads", 4)),
            io_backend=options.get("io_backend", "auto"),
            sharded=options.get("sharded"),
        )


def seconds(name: str, value: object, *, zero: bool = False) -> float:
    """Return `value` as finite seconds above zero (or zero, where that has a meaning)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise InvalidArgumentError(f"{name} must be a finite number of seconds, got {value!r}.")
    if value < 0 or (value == 0 and not zero):
        raise InvalidArgumentError(f"{name} must be {'0 or more' if zero else 'above 0'} s, got {value}.")
    return float(value)


def check_same_pages(host: HostPool, store: StoreLike) -> None:
    """Refuse a store whose pages are not the host pool's, byte for byte.

    Raises
    ------
    InvalidArgumentError
        Naming what differs and both values.
    """
    if host.geometry != store.geometry:
        raise InvalidArgumentError(
            "the store's geometry differs from the host pool's, so its pages hold other bytes: store "
            f"{store.geometry}, host pool {host.geometry}. Open the store with the host pool's geometry."
        )
    if host.layout.page_axes != store.layout.page_axes:
        raise InvalidArgumentError(
            "the store's order of axes differs from the host pool's, so its pages hold other bytes: store "
            f"{store.layout.value}, host pool {host.layout.value}. Open it with the host pool's layout."
        )
