"""`PageStore`: pages of KV by key, on files that any Zarr reader opens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hicache_tier.errors import InvalidArgumentError

from .core import StoreCore
from .getter import Getter
from .keeper import Keeper
from .keys import PageKey, normalise_key, normalise_keys
from .payloads import payload_of
from .putter import Offer, Putter
from .shutdown import Shutdown
from .status import ABSENT, DELETED, PageStatus, failed
from .store_stats import stats_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from numpy.typing import ArrayLike

    from hicache_tier.layout import Layout

    from .capacity import RootBudget
    from .closing import CloseReport
    from .engine import ByteEngine
    from .foreign import ForeignPages
    from .identity import Identity
    from .payload import Payload, Pool
    from .slab import FileCache
    from .writer import WriterPartition

_KEEPER_ENDS_S = 1.0


class PageStore:
    """A namespace of a store, open in this process. Make one with `open_store`.

    Thread-safe. `put`, `get` and `match_prefix` raise for wrong arguments only; a fault at run time is a
    falsy `PageStatus` with a reason, counted in `stats()`.

    Attributes
    ----------
    identity : Identity
        What the bytes mean; `identity.namespace` names the directory.
    geometry : KVGeometry
    layout : Layout
    root : Path
    """

    def __init__(
        self,
        *,
        identity: Identity,
        layout: Layout,
        budget: RootBudget,
        engine: ByteEngine,
        cache: FileCache,
        writer: WriterPartition | None,
        foreign: ForeignPages,
        verify_always: bool,
        verify_foreign: bool,
        checksums: bool,
        owns_engine: bool = True,
        asked: str = "",
    ) -> None:
        self.identity = identity
        self.layout = layout
        self.geometry = identity.geometry
        self.root = budget.root
        self._budget = budget
        self._cache = cache
        self._core = core = StoreCore(
            root=self.root,
            geometry=self.geometry,
            engine=engine,
            writer=writer,
            foreign=foreign,
            asked=asked,
            encrypted=identity.encrypted,
        )
        self._shutdown = Shutdown(core, cache, owns_engine=owns_engine)
        self._getter = Getter(core, verify_always=verify_always, verify_foreign=verify_foreign)
        self._putter: Putter | None = None
        self._keeper: Keeper | None = None
        try:
            with core.lock:
                if writer is not None:
                    self._putter = Putter(core, writer, checksums=checksums)
                    self._keeper = Keeper(core, writer, budget)
                    self._keeper.shrink()
                foreign.refresh()
                if self._keeper is not None:
                    self._keeper.start()  # last: what fails before leaves no thread behind
            self._shutdown.expect()
        except BaseException:  # a signal raised as the thread was started, say
            if self._keeper is not None:
                self._keeper.stop(_KEEPER_ENDS_S)
            raise

    # -- looking up ------------------------------------------------------------------------------------

    def match_prefix(self, keys: Sequence[PageKey], *, follow: bool = True) -> int:
        """Count the pages present, consecutively, from the first key on.

        Answered from memory; costs nothing per stored page. A page counted may be gone by the time it is
        read: `get` says so.

        Parameters
        ----------
        keys : sequence of bytes or hex text
        follow : bool
            Look at what other writers did since the last time, where that is some milliseconds ago. Without
            it no file is touched: for callers that a medium which hangs must not keep; they call `follow`
            elsewhere.
        """
        if follow:
            self._core.refresh()
        self._core.check_open()
        own, foreign = self._core.index, self._core.foreign.index
        count = 0
        for key in keys:
            try:
                there = key in own or key in foreign
            except (TypeError, ValueError):  # a bytearray, a view of one, or no key at all
                there = False
            if not there:
                name = normalise_key(key)
                if name is key or (name not in own and name not in foreign):
                    break
            count += 1
        return count

    def follow(self) -> None:
        """Look at what other writers did since the last time, where that is some milliseconds ago."""
        self._core.refresh()

    def due(self) -> bool:
        """Whether it is time to follow other writers, and nobody else is at it."""
        return self._core.due()

    def contains(self, keys: Sequence[PageKey], *, follow: bool = True) -> list[bool]:
        """Tell for each key whether its page is present; `follow` as in `match_prefix`."""
        if follow:
            self._core.refresh()
        self._core.check_open()
        own, foreign = self._core.index, self._core.foreign.index
        return [key in own or key in foreign for key in normalise_keys(keys)]

    def touch(self, keys: Sequence[PageKey]) -> list[bool]:
        """Make pages as recent as a read would, the first key's most; tell for each whether it is present.

        For pages that a cache in front of the store serves, so that the store does not take them for unused.
        Costs no I/O. Pages that another writer holds are told of, not touched.
        """
        core, names = self._core, normalise_keys(keys)
        with core.briefly() as alone:
            core.check_open()
            slots = [core.index.get(name) for name in names]
            if alone:
                core.touch(np.array([slot for slot in slots if slot is not None], np.int64))
            foreign = core.foreign.index
            return [slot is not None or name in foreign for slot, name in zip(slots, names, strict=True)]

    def tables(self, *, follow: bool = True) -> tuple[Mapping[bytes, object], Mapping[bytes, object]]:
        """Return the index of this process's partition and that of the others', to look keys up in."""
        if follow:
            self._core.refresh()
        self._core.check_open()
        return self._core.index, self._core.foreign.index

    @property
    def capacity_nbytes(self) -> int:
        """Cap on the root, for all writers together."""
        return self._budget.capacity_nbytes

    def __contains__(self, key: PageKey) -> bool:
        return self.contains([key])[0]

    def __len__(self) -> int:
        with self._core.briefly():
            return len(self._core.index.keys() | self._core.foreign.index.keys())

    # -- moving ----------------------------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[PageKey],
        host: Pool,
        pages: ArrayLike,
        *,
        parents: Sequence[PageKey | None] | None = None,
        pin: bool = False,
    ) -> list[PageStatus]:
        """Store pages of a host pool or of a device pool.

        Parameters
        ----------
        keys : sequence of bytes or hex text
            One a page; at most 32 bytes, longer ones are stored as their SHA-256. A batch is taken as a chain
            in prefix order: its first page is kept longest.
        host : HostPool or DevicePool
            Of the store's geometry; a host pool of its axis order too. The pages must not change until the
            call returns. Pages of a device pool go to disk without a host pool, after all that the current
            stream has been given.
        pages : int tensor or sequence, [n]
            Page numbers, one a key.
        parents : sequence, optional
            Key of the page before each page in its chain, None at the root. With it, a page is never evicted
            before the pages that continue it, across batches too.
        pin : bool
            Keep the pages until `unpin`.

        Returns
        -------
        list of PageStatus
            True where the page is stored (`stored`, `already_stored`).

        Raises
        ------
        InvalidArgumentError, ClosedError
            Before anything is touched.
        UnsupportedTransferError
            Where the path table has no device route for the pool; the same.
        EngineUnavailableError
            Where the engine that was insisted on does not move a device's memory; the same.
        """
        offer = self._offer(keys, host, pages, parents)
        with offer.payload.in_use():
            return self._store(offer, pin=pin)

    def get(self, keys: Sequence[PageKey], host: Pool, pages: ArrayLike) -> list[PageStatus]:
        """Load pages into a host pool or into a device pool.

        Parameters
        ----------
        keys : sequence of bytes or hex text
        host : HostPool or DevicePool
            Of the store's geometry; a host pool of its axis order too.
        pages : int tensor or sequence, [n]
            Page numbers to fill, one a key. A page whose status is falsy holds unspecified bytes.

        Returns
        -------
        list of PageStatus
            True where the page was loaded, whole and unchanged.

        Raises
        ------
        InvalidArgumentError, ClosedError, UnsupportedTransferError, EngineUnavailableError
            As `put`, before anything is touched.
        """
        names, payload = self._wanted(keys, host, pages)
        with payload.in_use():
            return self._load(names, payload)

    # -- removing and pinning --------------------------------------------------------------------------

    def delete(self, keys: Sequence[PageKey]) -> list[PageStatus]:
        """Remove pages; `other_writer` where another process's partition holds the page."""
        core, (_, writer) = self._core, self._writable()
        names = normalise_keys(keys)
        status: list[PageStatus] = []
        with core.session(), core.lock:
            for name in names:
                slot = core.index.pop(name, None)
                if slot is None:
                    status.append(failed("other_writer") if name in core.foreign.index else ABSENT)
                else:
                    writer.free([slot])
                    status.append(DELETED)
        core.count("delete", status)
        return status

    def clear(self) -> int:
        """Remove every page that this process's partition holds; return how many. Files of others stay."""
        core, (_, writer) = self._core, self._writable()
        with core.session(), core.lock:
            count = len(writer.keys)
            writer.free(list(writer.keys))
            core.index.clear()
        return count

    def pin(self, keys: Sequence[PageKey]) -> list[PageStatus]:
        """Keep pages from eviction until `unpin`, over restarts too."""
        return self._pin(keys, pinned=True)

    def unpin(self, keys: Sequence[PageKey]) -> list[PageStatus]:
        """Let pages be evicted again."""
        return self._pin(keys, pinned=False)

    def _pin(self, keys: Sequence[PageKey], *, pinned: bool) -> list[PageStatus]:
        core, (_, writer) = self._core, self._writable()
        names = normalise_keys(keys)
        with core.session(), core.lock:
            slots = [core.index.get(name) for name in names]
            held = np.unique(np.array([slot for slot in slots if slot is not None], np.int64))
            writer.set_pinned(held, pinned=pinned)
        word = PageStatus(True, "pinned" if pinned else "unpinned")
        return [ABSENT if slot is None else word for slot in slots]

    # -- state -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges as plain data: sizes in bytes, verdicts by reason."""
        return stats_of(self._core, self.identity, self._budget)

    def close(self, timeout: float = 10.0) -> CloseReport:
        """Sync, state that the partition is clean, and let go of it; within `timeout` seconds.

        Calls in flight are waited for most of that time; after it the files are left as a killed process
        would leave them, which loses nothing that was committed.

        Returns
        -------
        CloseReport
            What was left behind.
        """
        return self._shutdown.close(self._keeper, timeout)

    @property
    def closed(self) -> bool:
        """Whether it cannot be used any more."""
        return bool(self._core.closed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        core = self._core
        state = core.closed or f"{len(core.index)} pages, {core.engine.name}/{core.engine.mode}"
        return f"PageStore({str(self.root)!r}, namespace={self.identity.namespace}, {state})"

    # -- inside ----------------------------------------------------------------------------------------

    def _writable(self) -> tuple[Putter, WriterPartition]:
        self._core.check_open()
        if self._putter is None or self._core.writer is None:
            raise InvalidArgumentError("the store was opened read-only.")
        return self._putter, self._core.writer

    def _offer(
        self,
        keys: Sequence[PageKey],
        host: Pool,
        pages: ArrayLike,
        parents: Sequence[PageKey | None] | None,
    ) -> Offer:
        """Check what is to be stored."""
        self._writable()
        names = normalise_keys(keys)
        return Offer.of(names, parents, self._payload(host, pages, len(names)))

    def _store(self, offer: Offer, *, pin: bool) -> list[PageStatus]:
        """Store what was checked."""
        putter, _ = self._writable()
        self._core.refresh()
        with self._core.session():
            return putter.put(offer, pin=pin)

    def _wanted(self, keys: Sequence[PageKey], host: Pool, pages: ArrayLike) -> tuple[list[bytes], Payload]:
        """Check what is to be loaded; return keys and where they go."""
        self._core.check_open()
        names = normalise_keys(keys)
        return names, self._payload(host, pages, len(names), unique=True)

    def _payload(self, host: Pool, pages: ArrayLike, count: int, *, unique: bool = False) -> Payload:
        """Check pool and page numbers, and that there is what moves them."""
        payload = payload_of(host, pages, count, self.geometry, self.layout, unique=unique)
        self._core.engine_for(payload)
        return payload

    def _load(self, names: list[bytes], payload: Payload) -> list[PageStatus]:
        """Load what was checked."""
        self._core.refresh()
        with self._core.session():
            return self._getter.get(names, payload)
