"""Writes from the host tier to the store."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from .core import as_tensor
from .index import State
from .lane import Lane
from .policy import WritePolicy
from .remembering import Question, Uses
from .store import failure_reasons, optional_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .core import Core
    from .index import Entry
    from .reader import Reader


class Writer:
    """A bounded queue of pages to write, and the lane that writes them.

    The queue holds runs of pages in prefix order. When it is full, the oldest run loses pages from its end:
    what is left of it is still a prefix. Queued pages are pinned, so what is written is what was submitted.
    """

    def __init__(self, core: Core, reader: Reader) -> None:
        self.pages = 0
        self._core = core
        self._reader = reader
        self._runs: deque[list[Entry]] = deque()
        self._yield_since_s: float | None = None
        self._uses = Uses(core, self._lost)
        self._questions: deque[Question] = deque()
        self._contains = optional_call(core.store, "contains")
        self.lane = Lane("writes", core, self._take, self._retry_in_s)
        reader.on_idle.append(self.lane.wake)

    @property
    def in_flight_pages(self) -> int:
        """Pages that are with the store."""
        return sum(len(call.job.entries) for call in self.lane.calls if isinstance(call.job, _Put))

    @property
    def idle(self) -> bool:
        """Whether no page waits or is with the store, hung calls aside."""
        return not self._runs and all(call.late for call in self.lane.calls)

    @property
    def room(self) -> int:
        """Pages that could be queued now without any being dropped."""
        return 0 if self._refusing else self._core.settings.write_queue_pages - self.pages

    @property
    def _refusing(self) -> bool:
        """Whether the breaker keeps pages out: all of them, or all but those of the next probe."""
        waits = bool(self._runs) and self.lane.breaker.is_open
        return waits or not self.lane.due(time.monotonic())

    def offer(self, entries: Sequence[Entry]) -> None:
        """Queue a run of ready entries; what does not fit is dropped and counted."""
        fresh = [e for e in entries if e.state is State.READY and not e.stored and not e.queued]
        if not fresh:
            return
        if self._refusing:
            self._drop(fresh, "breaker_open")
            return
        capacity = self._core.settings.write_queue_pages
        run, rest = fresh[:capacity], fresh[capacity:]
        self._drop(rest, "queue_full")
        self.drop_oldest(self.pages + len(run) - capacity, "queue_full")
        self._core.index.pin(run)
        for entry in run:
            entry.queued = True
        self._runs.append(run)
        self.pages += len(run)
        self._core.counters.add("writes.queued_pages", len(run))
        self.lane.wake()

    def hit(self, entries: Sequence[Entry]) -> None:
        """See to entries that were used, in prefix order: tell the store, write what the policy wants."""
        if self._uses.note(entries):
            self.lane.wake()
        self._offer_by_policy(entries)

    def ask(self, entries: Sequence[Entry]) -> Question | None:
        """Have the store say whether it has the stored ones of these; None where it cannot be asked."""
        stored = [entry for entry in entries if entry.stored]
        rests = self.lane.breaker.is_open or not self.lane.due(time.monotonic())
        if self._contains is None or not stored or rests:
            return None
        self._questions.append(Question(self._contains, stored, lambda _: None))
        self.lane.wake()
        return self._questions[-1]

    def drop_questions(self) -> None:
        """Ask nothing more: the store hangs."""
        while self._questions:
            self._questions.popleft().expire()

    def _lost(self, entries: Sequence[Entry]) -> None:
        """See to pages that the store has evicted although they are used."""
        self._core.counters.add("writes.lost_pages", len(entries))
        self._offer_by_policy(entries)

    def _offer_by_policy(self, entries: Sequence[Entry]) -> None:
        settings = self._core.settings
        if settings.policy is WritePolicy.WRITE_THROUGH:
            self.offer(entries)
        elif settings.policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            self.offer([entry for entry in entries if entry.hits >= settings.hits_to_store])

    def drop_oldest(self, count: int, reason: str) -> int:
        """Drop up to `count` queued pages, tails of the oldest runs first; return how many there were."""
        dropped: list[Entry] = []
        while self._runs and len(dropped) < count:
            run = self._runs[0]
            dropped.append(run.pop())
            if not run:
                self._runs.popleft()
        self._unqueue(dropped, reason)
        return len(dropped)

    def drop_for_room(self, count: int) -> int:
        """Drop up to `count` queued pages that nothing but their write keeps in the host tier."""
        dropped: list[Entry] = []
        for run in self._runs:
            while run and run[-1].pins == 1 and len(dropped) < count:
                dropped.append(run.pop())
        self._runs = deque(run for run in self._runs if run)
        self._unqueue(dropped, "host_full")
        return len(dropped)

    def _unqueue(self, entries: Sequence[Entry], reason: str) -> None:
        self.pages -= len(entries)
        for entry in entries:
            entry.queued = False
        self._core.index.unpin(entries)
        self._drop(entries, reason)

    def _drop(self, entries: Sequence[Entry], reason: str) -> None:
        self._core.counters.add(f"writes.dropped_pages.{reason}", len(entries))
        for entry in entries:
            if entry.retiring:
                self._core.counters.add("evictions.pages.unsaved")
                self._core.index.discard(entry)

    def _take(self) -> _Put | Question | None:
        if self._questions:
            return self._questions.popleft()
        writes = bool(self._runs) and not self._yielding()
        uses_s = self._uses.due_in_s()
        if uses_s is not None and (writes or not uses_s) and not self.lane.breaker.is_open:
            uses = self._uses.take()  # before the write that could evict their pages
            if uses is not None:
                return uses
        if not writes or not self.lane.breaker.allow(time.monotonic()):
            return None
        batch: list[Entry] = []
        limit = self._core.settings.batch_pages
        while self._runs and len(batch) < limit:
            run, room = self._runs[0], limit - len(batch)
            batch += run[:room]
            del run[:room]
            if not run:
                self._runs.popleft()
        self.pages -= len(batch)
        self._yield_since_s = None
        return _Put(self._core, self, batch)

    def _yielding(self) -> bool:
        """Let waiting reads go first, for a bounded time."""
        if not self._reader.busy:
            return False
        now_s = time.monotonic()
        if self._yield_since_s is None:
            self._yield_since_s = now_s
        return now_s - self._yield_since_s < self._core.settings.write_yield_s

    def _retry_in_s(self) -> float | None:
        if not self._runs:
            uses_s = self._uses.due_in_s()
            return None if uses_s is None or self.lane.breaker.is_open else max(1e-3, uses_s)
        return max(1e-3, self.lane.breaker.retry_in_s(time.monotonic()), self._core.settings.write_yield_s)


class _Put:
    """One batch on its way to the store."""

    def __init__(self, core: Core, writer: Writer, entries: list[Entry]) -> None:
        self.entries = entries
        self._core = core
        self._writer = writer

    def run(self) -> object:
        """Write the pages."""
        core, entries = self._core, self.entries
        pages = as_tensor([entry.page for entry in entries])
        with core.host.in_use():
            statuses = core.store.put(
                [entry.key for entry in entries],
                core.host,
                pages,
                parents=[entry.parent for entry in entries],
            )
        return failure_reasons(statuses, len(entries))

    def finish(self, answer: object, error: BaseException | None) -> None:
        """Count what was stored; let go of the pages."""
        core = self._core
        reasons = (
            answer if isinstance(answer, list) and error is None else ["call_failed"] * len(self.entries)
        )
        for entry, reason in zip(self.entries, reasons, strict=True):
            entry.queued = False
            entry.stored = reason is None
            if reason is not None:
                core.counters.add(f"writes.failed_pages.{reason}")
        good = sum(entry.stored for entry in self.entries)
        core.counters.add("writes.stored_pages", good)
        core.counters.add("writes.bytes", good * core.host.page_nbytes)
        core.index.unpin(self.entries)
        for entry in self.entries:
            if entry.retiring and entry.state is State.READY and not entry.pins:
                core.counters.add(
                    "evictions.pages.written_back" if entry.stored else "evictions.pages.unsaved"
                )
                core.index.discard(entry)

    def expire(self) -> None:
        """Keep the pages, readable and pinned; drop the writes that wait behind a store that hangs."""
        for entry in self.entries:
            self._core.index.stay(entry)
        self._writer.drop_oldest(self._writer.pages, "breaker_open")
        self._writer.drop_questions()
