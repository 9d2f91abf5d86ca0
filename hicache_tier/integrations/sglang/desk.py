"""Calls of the stores on behalf of SGLang: side by side, within a deadline, or not at all."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from hicache_tier.errors import StoreError
from hicache_tier.tier.store import error_kind
from hicache_tier_storage.calls import Lane
from hicache_tier_storage.status import PageStatus, failed

from .health import Health
from .pool import LATE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .options import Options
    from .pool import Pages, Pool
    from .tally import Tally

_LOG = logging.getLogger(__name__)
_FOLLOW_EVERY_S = 0.02  # how often other writers are looked at, while there are lookups
_FOLLOW_S = 0.05  # what a lookup waits for that, at most, where it does not say
_SAMPLE_EVERY_S = 5.0
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.01, 0.05  # between two looks whether reads are to be tried out
_MOST_PROBES = 32  # that never return: at half a minute each, after the first
_OPEN_S = 60.0  # a store of millions of pages takes seconds
_CLOSE_S = 5.0
_CLEAR_S = 8.0
_BREAKER = failed("breaker_open")
_BUSY = failed("too_many_calls")
_READ_ONLY = failed("read_only")
_CLOSED = failed("closed")
_WEIGHTS = failed("weights_changed")


class Desk:
    """The stores of one process, and the threads that call them.

    Parameters
    ----------
    options : Options
    tally : Tally
    follow_s : float
        What a lookup waits for news of other writers, at most.
    weights : callable
        Returns the version of the weights that the server computes with. Once it is another than at first
        nothing is looked up, loaded or stored any more: the identity of the pages says the first.

    Attributes
    ----------
    pools : dict
        Registered pools by name.
    health : Health
    deadline_s : float
        Seconds that one call may take.
    pid : int
        Of the process that the threads are in.
    """

    def __init__(
        self,
        options: Options,
        tally: Tally,
        follow_s: float = _FOLLOW_S,
        weights: Callable[[], object] = lambda: None,
    ) -> None:
        self.pid = os.getpid()
        self._weights, self._first_weights = weights, weights()
        self._weights_differ = False
        self.pools: dict[str, Pool] = {}
        self.health = Health(options.probe_interval_s)
        self.deadline_s = options.deadline_s
        self._options, self._tally, self._follow_s = options, tally, follow_s
        self._lanes = {op: Lane(f"sglang-{op}", options.threads_per_direction) for op in ("get", "set")}
        self._side = Lane("sglang-side", 4)  # opening, following, sampling, clearing
        self._probes = Lane("sglang-probe", _MOST_PROBES)
        self._closing = threading.Event()
        self._followed_s = 0.0
        self._following, self._sampling = threading.Lock(), threading.Lock()
        self._suspects: list[Pages] = []
        self._watch = threading.Thread(target=self._watch_loop, name="hct-sglang-watch", daemon=True)
        self._watch.start()

    # -- moving ----------------------------------------------------------------------------------------------

    def get(self, parts: Sequence[Pages]) -> list[list[PageStatus]]:
        """Load pages of several pools; one list of verdicts each, within the deadline."""
        verdict = self._ended
        if verdict is None and self.health.reads_open:
            verdict = _BREAKER
        return self._move("get", parts) if verdict is None else self._refuse("get", parts, verdict)

    def put(self, parts: Sequence[Pages]) -> list[list[PageStatus]]:
        """Store pages of several pools; one list of verdicts each, within the deadline."""
        verdict = self._ended
        if verdict is None and self._options.read_only:
            verdict = _READ_ONLY
        if verdict is None and not self.health.allow_write():
            verdict = _BREAKER
        return self._move("set", parts) if verdict is None else self._refuse("set", parts, verdict)

    @property
    def _ended(self) -> PageStatus | None:
        """Why nothing is looked up or moved any more, or None."""
        if self._closing.is_set():
            return _CLOSED
        if (now := self._weights()) == self._first_weights:
            return None
        if not self._weights_differ:
            self._weights_differ = True
            _LOG.warning(
                "the weights are %r now and were %r when this was attached: nothing is loaded or stored "
                "until it is attached again",
                now,
                self._first_weights,
            )
        return _WEIGHTS

    def _move(self, op: str, parts: Sequence[Pages]) -> list[list[PageStatus]]:
        lane, started_s = self._lanes[op], time.monotonic()
        until_s = started_s + self.deadline_s
        width = min(len(parts), self._options.threads_per_direction)
        calls = [lane.start(partial(_one_by_one, op, parts[at::width])) for at in range(width)]
        late = False
        answers: list[list[PageStatus]] = []
        for at, part in enumerate(parts):
            call = calls[at % width]
            if call is None:
                part.status[:] = [_BUSY] * len(part.status)
            elif not call.wait(until_s):
                late = True
            elif call.error is not None:
                self._note_error(op, part, call.error)
            part.memory.lease.end()  # from here on nobody touches the pages
            answers.append(list(part.status))
        if late:
            self._suspects = list(parts)
            self.health.late()
            self._side.start(self.sample)
            _LOG.warning("storage did not %s %d pages in time", op, sum(len(part.names) for part in parts))
        elif op == "set":
            self.health.written(started_s)
        self._tally.call(op, parts, time.monotonic() - started_s, late=late)
        return answers

    @staticmethod
    def _note_error(op: str, part: Pages, error: BaseException) -> None:
        """Give pages whose verdict is not known the error of their call; the store itself raises none."""
        _LOG.error("%s of pool %s failed", op, part.pool.view.name, exc_info=error)
        verdict = failed(f"error: {error_kind(error)}")
        part.status[:] = [verdict if one is LATE else one for one in part.status]

    def _refuse(self, op: str, parts: Sequence[Pages], verdict: PageStatus) -> list[list[PageStatus]]:
        for part in parts:
            self._tally.refused(op, part.pool.view.name, verdict.kind, len(part.names))
        return [[verdict] * len(part.names) for part in parts]

    # -- registration ----------------------------------------------------------------------------------------

    def open(self, make: Callable[[], Pool]) -> Pool:
        """Open a pool's store, or give up: storage may hang.

        Raises
        ------
        StoreError
            Where that takes too long. What `make` raises is raised as it is.
        """
        if self._closing.is_set():
            raise StoreError("the adapter is closed.")
        given_up = threading.Event()

        def work() -> Pool:
            pool = make()
            if given_up.is_set():
                pool.store.close()
            return pool

        call = self._side.start(work)
        if call is None or not call.wait(time.monotonic() + _OPEN_S):
            given_up.set()
            raise StoreError(f"the store did not open within {_OPEN_S:.0f} s: {self._options.root}.")
        if call.error is not None:
            raise call.error
        pool: Pool = call.result
        return pool

    # -- looking up ------------------------------------------------------------------------------------------

    def may_look(self) -> bool:
        """Follow other writers, if it is time, and say whether lookups are answered."""
        if self.health.reads_open or self._ended is not None:
            return False
        self._follow()
        return True

    def _follow(self) -> None:
        """Have the stores look at what other writers did; wait a moment for it."""
        now_s = time.monotonic()
        if now_s - self._followed_s < _FOLLOW_EVERY_S or self._following.locked():
            return
        call = self._side.start(self._follow_all)
        if call is None:
            return
        self._followed_s = now_s
        call.wait(now_s + self._follow_s)

    def _follow_all(self) -> None:
        """Do it, unless that is under way already. No signal raises here, on a thread of the lane."""
        if not self._following.acquire(blocking=False):
            return
        try:
            for pool in list(self.pools.values()):
                pool.store.follow()
        finally:
            self._following.release()

    # -- in the background -----------------------------------------------------------------------------------

    def _watch_loop(self) -> None:
        sampled_s = time.monotonic()
        pause_s = max(_LEAST_PAUSE_S, min(_MOST_PAUSE_S, self._options.probe_interval_s / 4))
        while not self._closing.is_set():
            if self.health.suspected.is_set():
                self._closing.wait(pause_s)
                self._probe()
            else:
                self.health.suspected.wait(0.25)
            if time.monotonic() - sampled_s >= _SAMPLE_EVERY_S:
                sampled_s = time.monotonic()
                self._side.start(self.sample)

    def _probe(self) -> None:
        """Try reads out, if it is time."""
        if not self.health.probe_due():
            return
        started_s = time.monotonic()
        call = self._probes.start(self._try_reads)
        ok = call is not None and call.wait(started_s + self.deadline_s) and call.result is True
        self.health.probed(started_s, ok=ok)
        if ok:
            _LOG.info("storage answers again")

    def _try_reads(self) -> bool:
        """Read what was late, or any page of each pool."""
        suspects = {part.pool.view.name: part.names for part in self._suspects}
        return all(pool.probe(suspects.get(name, [])) for name, pool in list(self.pools.items()))

    def sample(self) -> None:
        """Set the gauges, unless that is under way already: it may hang."""
        if not self._sampling.acquire(blocking=False):
            return
        with suppress(Exception):  # a store that was closed meanwhile
            in_flight = {op: lane.in_flight for op, lane in self._lanes.items()}
            self._tally.sample(list(self.pools.values()), self.health, in_flight)
        self._sampling.release()

    # -- ending ----------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Remove the pages that this process stored; say whether that is done, and went well."""
        call = self._side.start(lambda: sum(pool.store.clear() for pool in list(self.pools.values())))
        if call is None or not call.wait(time.monotonic() + _CLEAR_S) or call.error is not None:
            _LOG.error(
                "the stores were not cleared: %s", call.error if call and call.error else "storage hangs"
            )
            return False
        _LOG.info("%d pages were removed", call.result)
        return True

    def close(self) -> None:
        """Refuse calls, and close the stores: within seconds, or in the background where they hang."""
        self._closing.set()
        self.health.suspected.set()  # wakes the watch
        until_s = time.monotonic() + _CLOSE_S
        self._watch.join(_CLOSE_S)
        for lane in self._lanes.values():
            lane.drain(until_s)
            lane.close()
        closer = threading.Thread(target=self._close_stores, name="hct-sglang-close", daemon=True)
        try:
            closer.start()
        except RuntimeError:  # none can be started, as at the end of the interpreter
            self._close_stores()
        else:
            closer.join(max(0.5, until_s - time.monotonic()))
        if closer.is_alive():
            _LOG.error("storage hangs: it is left to close in the background")
        self._side.close()
        self._probes.close()
        self.pools, self._suspects = {}, []  # and with them SGLang's memory
        self._tally.end()

    def _close_stores(self) -> None:
        for name, pool in list(self.pools.items()):
            try:
                pool.store.close(2.0)
            except Exception:  # noqa: BLE001 - the others are closed all the same
                _LOG.exception("the store of pool %s did not close cleanly", name)


def _one_by_one(op: str, parts: Sequence[Pages]) -> None:
    for part in parts:
        if op == "get":
            part.get()
        else:
            part.put()
