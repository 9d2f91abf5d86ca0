"""The tier: host pages and a store behind one set of verbs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, Unpack

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.host_pool import HostPool
from hicache_tier.paths import OPS, select_path

from .copies import Copies
from .core import Core
from .lock import PageLock
from .lookup import Lookup
from .names import distinct_keys
from .policy import Settings, TierOptions, check_same_pages
from .prefetch import Prefetch
from .reader import Reader
from .room import Room
from .shutdown import CloseReport, Shutdown
from .snapshot import snapshot
from .warming import Warming
from .writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from hicache_tier.device_pool import DevicePool
    from hicache_tier_storage.archive import Archive

    from .store import StoreLike


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prefix can be had without computing it.

    Attributes
    ----------
    host_pages : int
        Leading pages in the host tier: `load` brings them at once.
    store_pages : int
        Pages right after them that `prefetch` can add: in the store, or behind a hole of the host tier.
    """

    host_pages: int
    store_pages: int

    @property
    def pages(self) -> int:
        """Leading pages in all."""
        return self.host_pages + self.store_pages


class Tier:
    """Host tier and store for engines without a hierarchical cache of their own.

    The way of a request: `match` its keys; `prefetch` what the store has while it waits for its turn; `lock`
    what is there, `load` it, compute the rest; `insert` all of it. Nothing of this waits for the store but
    `Prefetch.wait`, and a fault of the store is a miss with a counted reason (`stats`).

    Pages of the host pool are allocated when they are needed and evicted least recently used, leaves before
    heads; pages that are locked, being copied, or with the store are never evicted.

    All methods may be called from several threads.

    With the `best_effort` prefetch, which is the default, `Prefetch.wait` returns what has arrived by then
    and stops the rest; choose `prefetch="timeout"` or `"wait_complete"` to wait for it.

    Examples
    --------
    >>> with Tier(host, store, prefetch="wait_complete") as tier:  # doctest: +SKIP
    ...     tier.prefetch(keys).wait()  # store -> host, while the request queues
    ...     with tier.lock(keys) as lock:
    ...         hit = tier.load(keys, device, device_pages)  # host -> device: `hit` leading pages
    ...     tier.insert(keys, device, device_pages)  # device -> host -> store, what was computed

    Parameters
    ----------
    host : HostPool
        Where pages are held. Other owners may use the pool too; the tier takes what is free.
    store : PageStore
        An open store of the same geometry and layout. It stays the caller's: close the tier first.
    **options
        See `Settings` for what they mean, their units and defaults: `policy`, `prefetch`, `hits_to_store`,
        `batch_pages`, `write_queue_pages`, `read_queue_pages`, `write_back_reserve_pages`, `write_yield_s`,
        `prefetch_timeout_s`, `lookup_timeout_s`, `deadline_s`, `probe_interval_s`, `max_stuck_threads`,
        `io_backend`, `sharded`.

    Raises
    ------
    InvalidArgumentError
        An option that is unknown or out of range, or a store that holds other pages than the host pool.
    UnsupportedTransferError
        Where the path table refuses `io_backend` for this pool. In all cases no thread was started.
    """

    def __init__(self, host: HostPool, store: StoreLike, **options: Unpack[TierOptions]) -> None:
        if not isinstance(host, HostPool):
            raise InvalidArgumentError(f"host must be a HostPool, got {type(host).__name__}.")
        settings = Settings.parse(options, host.num_pages)
        check_same_pages(host, store)
        sharded = host.owned_layers is not None if settings.sharded is None else settings.sharded
        for op in OPS:
            select_path(host.geometry.kind, host.layout, settings.io_backend, sharded=sharded, op=op)
        self.settings = settings
        unbounded = getattr(store, "on_this_thread", store)  # the lanes have deadlines of their own
        self._core = Core(host, unbounded, settings)
        self._reader = Reader(self._core)
        self._writer = Writer(self._core, self._reader)
        self._lookup = Lookup(self._core, self._reader)
        room = Room(self._core, self._writer)
        self._reader.room = room.take
        self._copies = Copies(self._core, room, self._reader, self._writer)
        self._warming = Warming(self._core, self._writer)
        self._shutdown = Shutdown(self._core, self._reader, self._writer)

    def match(self, keys: Iterable[bytes | str]) -> Match:
        """Say how many leading pages there are, in the host tier and then in the store.

        Waits at most `lookup_timeout_s` for the store; where it does not answer, what it may have counts as
        not there (`stats()["misses"]`). A page can be gone by the time it is asked for.
        """
        names = distinct_keys(keys)
        core = self._core
        with core.section():
            ready = core.index.ready_prefix(names)
            core.index.touch(ready)
            rest = names[len(ready) :]
            absent = [name for name in rest if core.index.get(name) is None]
            found, reason = self._lookup.ask(absent) if absent else (0, None)
            stored = set(absent[:found])
            usable = next(
                (i for i, name in enumerate(rest) if name not in stored and core.index.get(name) is None),
                len(rest),
            )
            core.counters.add("matches.calls")
            core.counters.add("matches.host_pages", len(ready))
            core.counters.add("matches.store_pages", usable)
            core.counters.add(f"misses.pages.{reason or 'absent'}", len(rest) - usable)
        return Match(len(ready), usable)

    def insert(
        self,
        keys: Iterable[bytes | str],
        device: DevicePool,
        device_pages: object,
        *,
        parent: bytes | str | None = None,
    ) -> int:
        """Copy pages that the engine has computed into the host tier; queue their way to the store.

        Pages that are there already are not copied again. Where the host tier has no room, the tail is left
        out. The device pages may be reused when the call returns.

        Parameters
        ----------
        keys : iterable of bytes or str
            Keys of consecutive pages, in order: the whole prefix, or a later part with `parent`.
        device : DevicePool
        device_pages : torch.Tensor, list or range
            Pages of the device pool, one a key.
        parent : bytes or str, optional
            Key of the page before the first, where that is not the first of the prompt. Where it comes after
            that page already, by what earlier calls said, the page counts as the first of a prompt.

        Returns
        -------
        int
            Leading pages of `keys` that the host tier holds now.

        Raises
        ------
        InvalidArgumentError
            Keys and pages that do not go together, pages that the device pool has not, or a `parent` that is
            one of the keys.
        """
        return self._copies.insert(keys, device, device_pages, parent)

    def load(
        self,
        keys: Iterable[bytes | str],
        device: DevicePool,
        device_pages: object,
        layer: int | None = None,
    ) -> int:
        """Copy the leading pages that the host tier holds to the device; return how many.

        Parameters
        ----------
        keys : iterable of bytes or str
        device : DevicePool
        device_pages : torch.Tensor, list or range
            Pages of the device pool, one a key; those beyond the returned count are untouched.
        layer : int, optional
            Load one layer only (its global number). Lock the pages over the calls for all layers.

        Raises
        ------
        InvalidArgumentError
            As for `insert`.
        """
        return self._copies.load(keys, device, device_pages, layer)

    def prefetch(self, keys: Iterable[bytes | str]) -> Prefetch:
        """Begin to bring pages from the store into the host tier; never waits.

        Where the store hangs or too much is under way already, the handle has ended from the start and says
        why.
        """
        names = distinct_keys(keys)
        with self._core.section():
            handle = Prefetch(self._core, self._reader, names)
            complete = handle.pending_pages == 0
            refusal = None if complete else self._reader.start(handle)
            if complete or refusal:
                handle.end(refusal)
        return handle

    def warm(
        self, archive: str | Path | Archive, *, kv_heads: int | None = None, allow_lossy: bool = False
    ) -> int:
        """Fill free host pages with pages of an archive, those used last first; return how many.

        For a server that starts: it reads in the caller's thread and evicts nothing. Pages are those of the
        store's own model, adapter, tenant and rank, each checked; another layout, page size, number of ranks
        or dtype is converted where that can be done. What the policy wants in the store goes there.

        Parameters
        ----------
        archive : path, str or Archive
            A folder, a `.zip`, or the URL of an object store.
        kv_heads : int, optional
            KV heads of the model, where ranks of the archive hold copies of a head.
        allow_lossy : bool
            Take pages whose values must be rounded.

        Raises
        ------
        ArchiveError
            Where it is no archive, or has nothing for this tier. Nothing was touched.
        InvalidArgumentError
            Where the store does not tell its identity.
        """
        return self._warming.warm(archive, kv_heads=kv_heads, allow_lossy=allow_lossy)

    def lock(self, keys: Iterable[bytes | str]) -> PageLock:
        """Keep the leading pages that are in the host tier from being evicted, until released.

        The lock says how many `pages` it holds, and is a context manager.
        """
        names = distinct_keys(keys)
        with self._core.section():
            chain = self._core.index.ready_prefix(names)
            self._core.index.touch(chain)
            return PageLock(self._core, chain)

    def unlock(self, lock: PageLock) -> None:
        """Release a lock; the same as its `release`."""
        lock.release()

    def flush(self, timeout_s: float = 10.0) -> int:
        """Write out what the policy wants in the store, and wait for it.

        With `write_back` that is every page; with the other policies also pages whose write was dropped or
        failed before.

        Returns
        -------
        int
            Pages of these that are not in the store (0: all is well); returns early where the store hangs
            and cannot be tried again within `timeout_s`.
        """
        return self._shutdown.flush(timeout_s)

    def reset(self) -> None:
        """Forget all pages of the host tier; the store is left as it is.

        Never waits: pages that are locked, or with the store, are not found any more, but stay owned until
        they are let go. Prefetches under way end, writes that wait are dropped and counted.
        """
        self._shutdown.reset()

    def close(self, timeout_s: float = 10.0) -> CloseReport:
        """Flush, end all threads, and give the host pages back, within `timeout_s`.

        The report says what had to be abandoned. A second call returns the same report; one that is made
        meanwhile waits for it, and says what is left so far where that takes longer than its own `timeout_s`.
        """
        return self._shutdown.close(timeout_s)

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges as plain data; see `snapshot`."""
        return snapshot(self._core, self._reader, self._writer)

    def __repr__(self) -> str:
        core = self._core
        state = "closed" if core.closed else f"{core.owned_pages} of {core.host.num_pages} host pages"
        return f"Tier({core.settings.policy.value}, {state}, {core.store!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
