"""Several directories, drives for example, as one store without RAID.

Each is an ordinary root with a partition of its own, so the format knows nothing of it. New pages are spread
by their keys; where a page is, is looked up in the indexes of all. A batch is under way on all roots at once.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_tier.errors import ClosedError, EngineUnavailableError, InvalidArgumentError

from .closing import Closer, CloseReport
from .daemon_pool import DaemonPool
from .keys import PageKey, normalise_keys
from .placement import Placement
from .status import PageStatus, failed
from .store import PageStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import ArrayLike

    from .payload import Pool

_LOG = logging.getLogger(__name__)
_THREADS_A_ROOT = 4  # calls under way on one root, beside the one that the caller's thread makes
_REFUSALS = (ClosedError, EngineUnavailableError, InvalidArgumentError)  # of a call, whatever the root
_T = TypeVar("_T")


class SeveralRoots(PageStore):
    """A store over several directories; used like a `PageStore` on one.

    A root that fails or is full takes out its own pages: puts to it are refused with a reason, its pages are
    misses, the others go on. One that cannot be opened, or not in time, is left out with a warning. Pages are
    evicted least recent first within each root; that leaves go before heads holds among pages of one root.

    Parameters
    ----------
    stores : mapping of Path to PageStore
        The roots that could be opened.
    left_out : mapping of Path to str
        Those that could not, and why.

    Attributes
    ----------
    roots : tuple of Path
        The directories in use.
    stores : dict of Path to PageStore
        The store in each of them.
    left_out : dict of Path to str
        As given.
    """

    def __init__(self, stores: Mapping[Path, PageStore], left_out: Mapping[Path, str]) -> None:
        self.roots = tuple(stores)
        self.stores, self.left_out = dict(stores), dict(left_out)
        self._stores = list(stores.values())
        first = self._stores[0]
        self.identity, self.layout, self.geometry = first.identity, first.layout, first.geometry
        self.root = first.root
        self._placement = Placement([store.capacity_nbytes for store in self._stores])
        self._pools = [
            DaemonPool(_THREADS_A_ROOT, f"hct-root{number}") for number in range(len(self._stores))
        ]

    # -- looking up ------------------------------------------------------------------------------------

    def match_prefix(self, keys: Sequence[PageKey], *, follow: bool = True) -> int:
        """Count the pages present in any root, consecutively, from the first key on."""
        tables = self._tables(follow=follow)
        count = 0
        for key in normalise_keys(keys):
            if not any(key in table for table in tables):
                break
            count += 1
        return count

    def follow(self) -> None:
        """Look at what other writers did in every root."""
        for store in self._stores:
            store.follow()

    def due(self) -> bool:
        """Whether it is time to follow other writers in any root."""
        return any(store.due() for store in self._stores)

    def contains(self, keys: Sequence[PageKey], *, follow: bool = True) -> list[bool]:
        """Tell for each key whether its page is present in any root."""
        tables = self._tables(follow=follow)
        return [any(key in table for table in tables) for key in normalise_keys(keys)]

    def touch(self, keys: Sequence[PageKey]) -> list[bool]:
        """Make pages as recent as a read would, wherever they are; tell for each whether it is present."""
        names = normalise_keys(keys)
        there = [False] * len(names)
        for store, rows in zip(self._stores, self._places(names), strict=True):
            for row, present in zip(rows, store.touch([names[row] for row in rows]), strict=True):
                there[row] = present
        return there

    def __len__(self) -> int:
        found: set[bytes] = set()
        for table in self._tables():
            found.update(list(table))
        return len(found)

    def _tables(self, *, follow: bool = True) -> list[Mapping[bytes, object]]:
        return [table for store in self._stores for table in store.tables(follow=follow)]

    def _places(self, names: Sequence[bytes]) -> list[list[int]]:
        """Return for each root the rows of the keys that it holds, or that belong there."""
        tables = [store.tables() for store in self._stores]
        rows: list[list[int]] = [[] for _ in self._stores]
        for row, name in enumerate(names):
            held = (number for number, (own, others) in enumerate(tables) if name in own or name in others)
            number = next(held, None)
            rows[self._placement.home(name) if number is None else number].append(row)
        return rows

    @property
    def capacity_nbytes(self) -> int:
        """Cap on all roots together."""
        return sum(store.capacity_nbytes for store in self._stores)

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
        """Store pages of a pool, on all roots at once; see `PageStore.put`."""
        offer = self._stores[0]._offer(keys, host, pages, parents)  # noqa: SLF001 - of its own class

        def store(one: PageStore, rows: list[int]) -> list[PageStatus]:
            return one._store(offer.take(rows), pin=pin)  # noqa: SLF001 - the same

        with offer.payload.in_use():
            return self._on_all(offer.keys, store)

    def get(self, keys: Sequence[PageKey], host: Pool, pages: ArrayLike) -> list[PageStatus]:
        """Load pages into a pool, from all roots at once; see `PageStore.get`."""
        names, payload = self._stores[0]._wanted(keys, host, pages)  # noqa: SLF001 - the same

        def load(one: PageStore, rows: list[int]) -> list[PageStatus]:
            return one._load([names[row] for row in rows], payload.take(rows))  # noqa: SLF001 - the same

        with payload.in_use():
            return self._on_all(names, load)

    def _on_all(
        self, names: list[bytes], work: Callable[[PageStore, list[int]], list[PageStatus]]
    ) -> list[PageStatus]:
        """Let every root do its rows, the first of them on this thread; a root that raises fails its own."""
        all_rows = self._places(names)
        parts = [(one, rows) for one, rows in zip(self._stores, all_rows, strict=True) if rows]
        pools = [pool for pool, rows in zip(self._pools, all_rows, strict=True) if rows]
        futures: list[Future[list[PageStatus]]] = []
        answers: list[Callable[[], list[PageStatus]]] = [partial(work, *part) for part in parts[:1]]
        try:
            for pool, part in zip(pools[1:], parts[1:], strict=True):
                futures.append(pool.submit(work, *part))
            answers += [future.result for future in futures]
            return self._verdicts(len(names), parts, answers)
        finally:
            wait(futures)  # nobody touches the memory any more

    @staticmethod
    def _verdicts(
        count: int,
        parts: Sequence[tuple[PageStore, list[int]]],
        answers: Sequence[Callable[[], list[PageStatus]]],
    ) -> list[PageStatus]:
        """Collect what each root says of its rows; one that raises fails its own."""
        status: list[PageStatus] = [failed("root_failed")] * count

        def collect(store: PageStore, rows: list[int], answer: Callable[[], list[PageStatus]]) -> None:
            try:
                verdicts = answer()
            except _REFUSALS:
                raise
            except Exception as error:  # noqa: BLE001 - a fault of one drive is no fault of the others
                _LOG.exception("%s failed", store.root)
                verdicts = [failed(f"root_failed: {type(error).__name__}: {error}")] * len(rows)
            for row, verdict in zip(rows, verdicts, strict=True):
                status[row] = verdict

        all_answers([partial(collect, *part, answer) for part, answer in zip(parts, answers, strict=True)])
        return status

    # -- removing and pinning --------------------------------------------------------------------------

    def delete(self, keys: Sequence[PageKey]) -> list[PageStatus]:
        """Remove pages, wherever they are."""
        return self._on_all(normalise_keys(keys), _by_key(normalise_keys(keys), PageStore.delete))

    def clear(self) -> int:
        """Remove every page that this process's partitions hold; return how many."""
        return sum(all_answers([store.clear for store in self._stores]))

    def pin(self, keys: Sequence[PageKey]) -> list[PageStatus]:
        """Keep the pages from eviction until `unpin`, over restarts too."""
        return self._on_all(normalise_keys(keys), _by_key(normalise_keys(keys), PageStore.pin))

    def unpin(self, keys: Sequence[PageKey]) -> list[PageStatus]:
        """Let pages be evicted again."""
        return self._on_all(normalise_keys(keys), _by_key(normalise_keys(keys), PageStore.unpin))

    # -- state -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return sums over the roots, and under `roots` what each says for itself."""
        each = [store.stats() for store in self._stores]
        total: dict[str, Any] = {}
        for name, value in each[0].items():
            values = [one[name] for one in each]
            if isinstance(value, dict):
                total[name] = dict(sum((Counter(one) for one in values), Counter()))
            elif isinstance(value, list):
                total[name] = [line for one in values for line in one]
            elif isinstance(value, int) and name != "page_nbytes":
                total[name] = sum(values)
            else:
                total[name] = value if len(set(values)) == 1 else ", ".join(map(str, values))
        total["roots"] = [
            *({"root": str(root), **one} for root, one in zip(self.roots, each, strict=True)),
            *({"root": str(root), "left_out": why} for root, why in self.left_out.items()),
        ]
        return total

    def close(self, timeout: float = 10.0) -> CloseReport:
        """Close every root at once; see `PageStore.close`."""
        closers = [
            Closer(
                lambda until_s, store=store: store.close(max(0.0, until_s - time.monotonic())),  # type: ignore[misc]
                lambda: CloseReport(synced=False),
            )
            for store in self._stores
        ]
        for closer in closers:
            closer.start(timeout)
        errors: list[Exception] = []
        reports: list[CloseReport] = []
        for closer in closers:
            try:
                reports.append(closer.result())
            except Exception as error:  # noqa: BLE001 - the others are closed all the same
                errors.append(error)
        self.end_threads()
        if errors:
            raise errors[0]
        abandoned = sum(report.abandoned_calls for report in reports)
        return CloseReport(abandoned, synced=all(report.synced for report in reports))

    def end_threads(self) -> None:
        """Let the threads that make calls on roots end; the stores stay open."""
        for pool in self._pools:
            pool.shutdown()

    @property
    def closed(self) -> bool:
        """Whether it cannot be used any more."""
        return self._stores[0].closed

    def __repr__(self) -> str:
        inside = ", ".join(map(repr, self._stores))
        return f"SeveralRoots({inside})"


def all_answers(answers: Sequence[Callable[[], _T]]) -> list[_T]:
    """Get every answer, then raise the first error that there was."""
    errors: list[Exception] = []
    found: list[_T] = []
    for answer in answers:
        try:
            found.append(answer())
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
    if errors:
        raise errors[0]
    return found


def _by_key(
    names: list[bytes], verb: Callable[[PageStore, list[bytes]], list[PageStatus]]
) -> Callable[[PageStore, list[int]], list[PageStatus]]:
    return lambda store, rows: verb(store, [names[row] for row in rows])
