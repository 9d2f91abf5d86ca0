"""Housekeeping of an open store, on a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from hicache_tier.errors import StoreError

if TYPE_CHECKING:
    from .capacity import RootBudget
    from .core import StoreCore
    from .writer import WriterPartition

_LOG = logging.getLogger(__name__)
_TICK_S = 0.2
_PUBLISH_S = 0.6
_ACCESS_PUBLISH_S = 60
_PUBLISHED_AT_ONCE = 4096


class Keeper:
    """Writes access times, at most once a minute a page, and gives up slabs that other writers ask for.

    Where the partition is another writer's by now, it is the first to see it, and ends.
    """

    def __init__(self, core: StoreCore, writer: WriterPartition, budget: RootBudget) -> None:
        self._core, self._writer, self._budget = core, writer, budget
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hct-keeper", daemon=True)

    def start(self) -> None:
        """Start the thread.

        Raises
        ------
        StoreError
            Where the process may have no more threads.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            raise StoreError(f"{self._core.root} cannot be kept: {error}.") from error

    def stop(self, timeout: float) -> None:
        """End the thread, waiting up to `timeout` seconds; one that is being started ends by itself."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def shrink(self) -> None:
        """Give up slabs until the root is within a cap that was lowered. The lock must be held.

        Those of writers that are gone go first, coldest first.
        """
        with self._budget.lock():
            while (excess := self._budget.excess_nbytes()) > 0:
                if not self._budget.reclaim(self._writer.paths, excess) and not self._core.shed():
                    return

    def _run(self) -> None:
        published = time.monotonic()
        while not self._stop.wait(_TICK_S):
            try:
                if self._core.lost_partition():
                    return
                asked = self._budget.excess(self._writer.paths)
                due = time.monotonic() >= published + _PUBLISH_S
                if not (asked or due):
                    continue
                with self._core.lock:
                    if self._core.closed or self._stop.is_set():
                        return
                    if due:
                        published = time.monotonic()
                        self._writer.publish_access(older_than_s=_ACCESS_PUBLISH_S, most=_PUBLISHED_AT_ONCE)
                    if asked and self._core.shed():
                        self._budget.demand_met()
            except Exception:  # noqa: BLE001 - whatever it is, the store goes on serving
                _LOG.exception("%s: housekeeping failed; it goes on", self._core.root)
