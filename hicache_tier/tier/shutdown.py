"""Writing everything out, starting over, and ending."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .index import State
from .policy import WritePolicy

if TYPE_CHECKING:
    from .core import Core
    from .index import Entry
    from .reader import Reader
    from .writer import Writer

log = logging.getLogger(__name__)
_FLUSH_SHARE = 0.8
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What a tier left behind when it was closed.

    Attributes
    ----------
    unsaved_pages : int
        Pages that the policy wanted in the store and that are not there.
    abandoned_calls : tuple[str, ...]
        Directions of store calls that had not returned, one entry a call.
    abandoned_pages : int
        Host pages that such calls may still read or write. They stay allocated in the host pool, so that
        nobody gets them, and are freed by the call itself should it ever return.
    """

    unsaved_pages: int = 0
    abandoned_calls: tuple[str, ...] = ()
    abandoned_pages: int = 0

    @property
    def clean(self) -> bool:
        """Whether nothing was left behind."""
        return not self.unsaved_pages and not self.abandoned_calls


class Shutdown:
    """`flush`, `reset` and `close` of a tier."""

    def __init__(self, core: Core, reader: Reader, writer: Writer) -> None:
        self._core = core
        self._reader = reader
        self._writer = writer
        self._report: CloseReport | None = None
        self._unsaved_pages = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closing = False

    def flush(self, timeout_s: float) -> int:
        """See `Tier.flush`."""
        core, breaker = self._core, self._writer.lane.breaker
        until_s = time.monotonic() + timeout_s
        with core.section():
            self._doubt(until_s)
            todo = [entry for entry in self._unsaved() if not entry.queued]
            todo.sort(key=lambda entry: entry.stamp)  # taken from the end: prefix by prefix, heads first
            while True:
                batch = [todo.pop() for _ in range(min(len(todo), self._writer.room))]
                self._writer.offer(batch)
                now_s = time.monotonic()
                retry_s = now_s + breaker.retry_in_s(now_s)
                if (not todo and self._writer.idle) or max(now_s, retry_s) > until_s:
                    self._doubt(until_s)  # what was written may have taken the place of other pages
                    return len(self._unsaved())
                core.wait(min(until_s, max(retry_s, now_s + _POLL_S)))

    def reset(self) -> None:
        """See `Tier.reset`."""
        with self._core.section():
            self._forget("reset")

    def close(self, timeout_s: float) -> CloseReport:
        """See `Tier.close`."""
        if self._core.forked:
            return CloseReport()
        mine, wait_s = False, min(max(0.0, timeout_s), threading.TIMEOUT_MAX)
        try:
            with self._lock:
                if self._changed.wait_for(lambda: not self._closing, wait_s):
                    self._closing = mine = True  # with no call in between, where a signal could raise
            if not mine:
                with self._core.held():  # another call closes, and takes longer than this one may
                    return self._left()
            if self._report is None:
                self._report = self._close(timeout_s)
            return self._report
        finally:
            if mine:
                with self._lock:
                    self._closing = False
                    self._changed.notify_all()

    def _close(self, timeout_s: float) -> CloseReport:
        core = self._core
        until_s = time.monotonic() + timeout_s
        if not core.closed:  # an earlier call was interrupted after this
            self._unsaved_pages = self.flush(timeout_s * _FLUSH_SHARE)
        with core.held():
            core.closed = True
            self._forget("closed")
            for lock in list(core.locks):
                lock.drop()
            for lane in core.lanes:
                lane.stop()
        for lane in core.lanes:
            lane.join(until_s)
        with core.held():
            report = self._left()
        if not report.clean:
            log.warning("a tier was closed and left something behind: %s", report)
        return report

    def _left(self) -> CloseReport:
        """Say what is left behind as it stands, with the lock."""
        core = self._core
        unsaved = self._unsaved_pages if core.closed else len(self._unsaved())
        calls = tuple(lane.name for lane in core.lanes for _ in lane.calls)
        return CloseReport(unsaved, calls, core.index.detached_pages)

    def _doubt(self, until_s: float) -> None:
        """Ask a store that can tell whether it still has what it said it had."""
        question = self._writer.ask([entry for entry in self._core.index if entry.state is State.READY])
        while question is not None and not question.over and self._core.wait(until_s):
            pass

    def _unsaved(self) -> list[Entry]:
        settings = self._core.settings
        hits = settings.hits_to_store if settings.policy is WritePolicy.WRITE_THROUGH_SELECTIVE else 0
        ready = (entry for entry in self._core.index if entry.state is State.READY)
        return [entry for entry in ready if not entry.stored and entry.hits >= hits]

    def _forget(self, reason: str) -> None:
        """Give up everything that waits and forget all pages; those in use stay owned until they are not."""
        self._reader.give_up_queued(reason)
        self._writer.drop_oldest(self._writer.pages, reason)
        for entry in list(self._core.index):
            self._core.index.discard(entry)
