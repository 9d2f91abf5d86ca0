"""The end of a store on one root, in this process or in a child of fork."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

from .closing import Closer, CloseReport

if TYPE_CHECKING:
    from .core import StoreCore
    from .keeper import Keeper
    from .slab import FileCache

_LOG = logging.getLogger(__name__)
_PATIENCE = 0.8  # of the time that a close has: for calls in flight
_EXPECTED: weakref.WeakSet[Shutdown] = weakref.WeakSet()


class Shutdown:
    """The end of an open store, which comes once.

    Parameters
    ----------
    core : StoreCore
    cache : FileCache
    owns_engine : bool
        Whether the engine is closed too: one that the caller passed in may serve other stores.
    """

    def __init__(self, core: StoreCore, cache: FileCache, *, owns_engine: bool) -> None:
        self._core, self._cache, self._owns_engine = core, cache, owns_engine
        self._once = threading.Lock()

    def expect(self) -> None:
        """Have a child of fork use nothing of the store's: it is open now."""
        _EXPECTED.add(self)

    def after_fork(self) -> None:
        """Let go in a child of fork."""
        core = self._core
        core.after_fork("the store was opened by another process; open it again in this one")
        self._cache.after_fork()
        if core.writer is not None:
            core.writer.disown_lock()

    def close(self, keeper: Keeper | None, timeout: float) -> CloseReport:
        """See `PageStore.close`."""
        core = self._core
        with self._once:
            if core.closed:
                return CloseReport()
            core.closed = "the store is closed"
        closer = Closer(
            lambda until_s: self._close(keeper, until_s), lambda: CloseReport(core.users, synced=False)
        )
        closer.start(timeout)
        report = closer.result()
        if report.abandoned_calls:
            _LOG.error(
                "%s: storage did not return %d calls within %g s: abandoned",
                core.root,
                report.abandoned_calls,
                timeout,
            )
        return report

    def _close(self, keeper: Keeper | None, until_s: float) -> CloseReport:
        core, left_s = self._core, max(0.0, until_s - time.monotonic())
        if keeper is not None:
            keeper.stop(left_s * _PATIENCE)
        with core.lock:
            left = core.drain(max(0.0, until_s - time.monotonic() - left_s * (1 - _PATIENCE)))
            _EXPECTED.discard(self)
            if left:
                core.when_idle = self._let_go  # the last call to return does it
            synced = not left and self._let_go(clean=True)
        return CloseReport(left, synced=synced)

    def _let_go(self, *, clean: bool = False) -> bool:
        """Give back what the store holds; whether all is on disk. The lock is held, no call in flight."""
        core, synced = self._core, clean
        try:
            if core.writer is not None and clean:
                core.writer.publish_access(older_than_s=0)
                synced = core.writer.sync_and_close()
            elif core.writer is not None:
                core.writer.abandon()
        finally:
            core.foreign.close()
            core.devices.close()
            if self._owns_engine:
                core.engine.close()
            self._cache.close()
        return synced


def _disown_parents_stores() -> None:
    for shutdown in list(_EXPECTED):
        shutdown.after_fork()
    _EXPECTED.clear()


os.register_at_fork(after_in_child=_disown_parents_stores)
