"""Reads from the store into the host tier."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from .core import as_tensor
from .index import State
from .lane import Lane
from .store import failure_reasons

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .core import Core
    from .index import Entry
    from .prefetch import Prefetch


class Reader:
    """A bounded queue of reads, and the lane that makes them.

    A prefetch first asks the store how much of it is there, so that nothing is evicted for pages that cannot
    come; then its pages are read in batches, each of which can be given up while it still waits.

    Attributes
    ----------
    active : list[Prefetch]
        Prefetches that something may still arrive for, oldest first.
    on_idle : list[callable]
        Called when no read waits or runs any more.
    """

    def __init__(self, core: Core) -> None:
        self.active: list[Prefetch] = []
        self.on_idle: list[Callable[[], None]] = []
        self.room: Callable[[int], list[int]] = core.take_free
        self._core = core
        self._queue: deque[_Look | Fetch] = deque()
        self._queued_keys: dict[bytes, Fetch] = {}
        self.lane = Lane("reads", core, self._take)

    @property
    def busy(self) -> bool:
        """Whether reads wait or run, hung ones aside."""
        return bool(self._queue) or any(not call.late for call in self.lane.calls)

    @property
    def pages(self) -> int:
        """Pages that prefetches still wait for."""
        return sum(prefetch.pending_pages for prefetch in self.active)

    def start(self, prefetch: Prefetch) -> str | None:
        """Begin a prefetch, or return why not."""
        if prefetch.pending_pages + self.pages > self._core.settings.read_queue_pages:
            return "read_queue_full"
        if not self.lane.allow(time.monotonic()):
            return "breaker_open"
        self.active.append(prefetch)
        self._queue.append(_Look(self._core, self, prefetch))
        self.lane.wake()
        return None

    def fetch(self, entries: Sequence[Entry]) -> list[Fetch]:
        """Queue reads of filling entries, in batches."""
        step = self._core.settings.batch_pages
        batches = [Fetch(self._core, self, list(entries[i : i + step])) for i in range(0, len(entries), step)]
        self._queue.extend(batches)
        for batch in batches:
            self._queued_keys |= dict.fromkeys((entry.key for entry in batch.entries), batch)
        self.lane.wake()
        return batches

    def queued_batch(self, key: bytes) -> Fetch | None:
        """Return the batch, not begun yet, that will bring a page."""
        return self._queued_keys.get(key)

    def withdraw(self, batches: Sequence[Fetch]) -> None:
        """Give up batches that still wait and that no active prefetch needs."""
        for batch in batches:
            if batch in self._queue and not any(batch in prefetch.batches for prefetch in self.active):
                self._queue.remove(batch)
                self._leave_queue(batch)
                batch.give_up()

    def _leave_queue(self, batch: Fetch) -> None:
        for entry in batch.entries:
            del self._queued_keys[entry.key]

    def give_up_queued(self, reason: str) -> None:
        """End every prefetch, and with them the reads that wait."""
        for prefetch in list(self.active):
            prefetch.end(reason)
        self._queue.clear()

    def advance(self) -> None:
        """Have prefetches look at what arrived or failed."""
        for prefetch in list(self.active):
            prefetch.advance()

    def _take(self) -> _Look | Fetch | None:
        while self._queue:
            job = self._queue.popleft()
            if isinstance(job, Fetch):
                self._leave_queue(job)
                return job
            if not job.prefetch.ended:
                return job
        for idle in self.on_idle:
            idle()
        return None


class _Look:
    """How many of a prefetch's pages the store has."""

    def __init__(self, core: Core, reader: Reader, prefetch: Prefetch) -> None:
        self.prefetch = prefetch
        self._core = core
        self._reader = reader
        self._keys = prefetch.missing_keys()

    def run(self) -> object:
        """Ask the store."""
        return present(self._core.store.match_prefix(self._keys), len(self._keys))

    def finish(self, answer: object, error: BaseException | None) -> None:
        """Have the prefetch ask for what there is."""
        if isinstance(answer, int) and error is None:
            self.prefetch.begin(set(self._keys[:answer]), self._reader.room)
        else:
            self.prefetch.end("lookup_failed")

    def expire(self) -> None:
        """Give up this and all other reads: the store hangs."""
        self._reader.give_up_queued("deadline")


class Fetch:
    """One batch of pages on its way from the store."""

    def __init__(self, core: Core, reader: Reader, entries: list[Entry]) -> None:
        self.entries = entries
        self._core = core
        self._reader = reader

    def run(self) -> object:
        """Read the pages."""
        core, entries = self._core, self.entries
        pages = as_tensor([entry.page for entry in entries])
        with core.host.in_use():
            statuses = core.store.get([entry.key for entry in entries], core.host, pages)
        return failure_reasons(statuses, len(entries))

    def finish(self, answer: object, error: BaseException | None) -> None:
        """Take over the pages before the first that failed; give the others back."""
        core = self._core
        reasons = (
            answer if isinstance(answer, list) and error is None else ["call_failed"] * len(self.entries)
        )
        first_bad = next((i for i, reason in enumerate(reasons) if reason is not None), len(reasons))
        good = 0
        for i, entry in enumerate(self.entries):
            if i < first_bad and entry.state is State.FILLING:
                entry.stored = True
                core.index.make_ready(entry)
                good += 1
            else:
                reason = "not_wanted_any_more" if i < first_bad else (reasons[i] or "after_a_miss")
                core.counters.add(f"reads.failed_pages.{reason}")
                core.index.discard(entry)
        core.counters.add("reads.loaded_pages", good)
        core.counters.add("reads.bytes", good * core.host.page_nbytes)
        # A byte engine that gave up waiting may still fill a page: it must never be lent again.
        late = {id(e) for e, reason in zip(self.entries, reasons, strict=True) if reason == "timeout"}
        core.counters.add("host.kept_after_timeout", len(late))
        core.index.unpin([entry for entry in self.entries if id(entry) not in late])
        self._reader.advance()

    def expire(self) -> None:
        """Forget the pages; their memory stays owned until the call returns."""
        for entry in self.entries:
            self._core.index.discard(entry)
        self._reader.give_up_queued("deadline")

    def give_up(self) -> None:
        """Give the pages back; the read was never made."""
        for entry in self.entries:
            self._core.index.discard(entry)
        self._core.index.unpin(self.entries)


def present(answer: object, asked: int) -> int:
    """Return a store's count of present keys, or say that it is none.

    Raises
    ------
    ValueError
        Where it is not a whole number in 0 .. `asked`.
    """
    count = int(answer)  # type: ignore[call-overload]
    if not 0 <= count <= asked:
        raise ValueError(f"the store found {count} of {asked} keys")
    return int(count)
