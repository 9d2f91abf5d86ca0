"""Offloads on their way: stored by one thread, several at a time, and reported in the order they came in."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LOG = logging.getLogger(__name__)
_MOST_PAGES: Final = 512  # of offloads that are stored together
_POLL_S: Final = 0.002


@dataclass(slots=True)
class Offload:
    """One offload.

    Attributes
    ----------
    parts : list of (pool, keys, slots)
        Name of each pool, SGLang's keys, and the slots of their pages on the device.
    ready : list of events
        Of the device, after which the pages are written.
    stored : bool or None
        Whether every page of it is stored; None until that is known.
    """

    parts: list[tuple[str, list[str], Any]]
    ready: list[Any] = field(default_factory=list)
    stored: bool | None = None

    @property
    def pages(self) -> int:
        """Pages of all pools."""
        return sum(len(keys) for _, keys, _ in self.parts)


class Offloads:
    """A queue of offloads, and the thread that empties it.

    Parameters
    ----------
    store : callable
        Stores some offloads, and returns for each whether all of it is stored. It looks at `stopping` before
        it reads any page, and every wait of it has a deadline.

    Attributes
    ----------
    stopping : bool
        Whether the pages of all offloads are about to become somebody else's.
    """

    def __init__(self, store: Callable[[Sequence[Offload]], list[bool]]) -> None:
        self._store = store
        self.stopping = False
        self._queue: queue.SimpleQueue[Offload | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._order: deque[Offload] = deque()
        self._thread = threading.Thread(target=self._loop, name="hct-sglang-offload", daemon=True)
        self._thread.start()

    def submit(self, offload: Offload) -> None:
        """Take an offload; one whose outcome is known is only reported."""
        with self._lock:
            self._order.append(offload)
        if offload.stored is None:
            self._queue.put(offload)

    @property
    def completed(self) -> int:
        """How many of the oldest offloads have an outcome."""
        with self._lock:
            count = 0
            for offload in self._order:
                if offload.stored is None:
                    break
                count += 1
            return count

    def pop(self) -> bool:
        """Report the oldest.

        Raises
        ------
        IndexError
            Where it has no outcome yet.
        """
        with self._lock:
            if not self._order or self._order[0].stored is None:
                raise IndexError("no offload is completed")
            return bool(self._order.popleft().stored)

    def drain(self, until_s: float) -> bool:
        """Wait for all outcomes, and forget them; say whether all came by a time on the monotonic clock.

        What has none by then is given up: once this has returned no page of an offload is read any more.
        """
        while self._waiting and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        done = not self._waiting
        self.stopping = True
        while self._waiting:  # the call that is under way ends by its deadline
            time.sleep(_POLL_S)
        self.stopping = False
        with self._lock:
            self._order.clear()
        return done

    @property
    def _waiting(self) -> bool:
        with self._lock:
            return any(offload.stored is None for offload in self._order)

    def close(self, until_s: float) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join(max(0.0, until_s - time.monotonic()))

    def _loop(self) -> None:
        while (first := self._queue.get()) is not None:
            batch, last = self._more([first])
            try:
                outcomes = [False] * len(batch) if self.stopping else self._store(batch)
            except Exception:  # noqa: BLE001 - whatever it is, the thread lives on
                _LOG.exception("%d offloads failed", len(batch))
                outcomes = [False] * len(batch)
            for offload, stored in zip(batch, outcomes, strict=True):
                offload.stored = stored
            if last:
                return

    def _more(self, batch: list[Offload]) -> tuple[list[Offload], bool]:
        """Add what waits already, up to a bound; say whether the end is among it."""
        pages = batch[0].pages
        while pages < _MOST_PAGES:
            try:
                offload = self._queue.get_nowait()
            except queue.Empty:
                break
            if offload is None:
                return batch, True
            batch.append(offload)
            pages += offload.pages
        return batch, False
