"""A store on one root whose every call ends by a deadline, whatever storage does."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from hicache_tier.errors import StoreError

from .abandoned import Abandonable, abandonable
from .calls import Call, Lane
from .pending import Pending
from .status import PageStatus, failed
from .store import PageStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import ArrayLike

    from .closing import CloseReport
    from .keys import PageKey
    from .payload import Pool

_LOG = logging.getLogger(__name__)
DEADLINE_S = 30.0
_MOST_CALLS = 64  # under way on one root
_MOST_LATE = 4  # that were left and did not return: storage is known to hang
_FOLLOW_S = 0.1  # what a lookup waits for news of other writers
_LATE = failed("timeout: storage did not answer in time")
_HANGS = failed("timeout: earlier calls hang")


class DeadlineError(StoreError, TimeoutError):
    """Storage did not answer in time, and there is no verdict that could say so."""

    kind = "timeout"


class BoundedStore(PageStore):
    """A store whose calls are made on threads of their own, and left there when they are late.

    A page whose call was late has the verdict `timeout`. Nothing that is written from its memory is committed
    any more, and nothing lands in it that could be taken for something else: a `HostPool` gives it to nobody
    before the call has returned, all other memory is written to by way of the store's own. Its slot stays
    taken until the call returns. While several late calls have not returned, others are `timeout` at once.
    Where the process may have no more threads, calls are made on the caller's, without a deadline.

    Pages of a device pool are touched after all that the caller's current stream had been given, which is
    waited for within the deadline, and they have arrived when the call returns. Reads go through the store's
    staging memory, also where an engine could put fragments straight into the pool; without a deadline it
    does. Copies from there that are under way when the deadline comes are waited for: those of one step, some
    milliseconds of a device that works.

    Parameters
    ----------
    inner : PageStore
        On one root.
    deadline_s : float

    Attributes
    ----------
    deadline_s : float
    on_this_thread : PageStore
        The store without deadlines, for those who make its calls on threads of their own.
    """

    def __init__(self, inner: PageStore, deadline_s: float) -> None:
        self.on_this_thread = inner
        self.deadline_s = deadline_s
        self.identity, self.layout, self.geometry = inner.identity, inner.layout, inner.geometry
        self.root = inner.root
        self._lane = Lane("store", _MOST_CALLS)
        self._late = 0
        self._late_lock = threading.Lock()
        self._pid = os.getpid()
        self._told = False

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of its insides
        if name == "on_this_thread":  # not there yet: a copy, say
            raise AttributeError(name)
        return getattr(self.on_this_thread, name)

    # -- looking up ------------------------------------------------------------------------------------

    def match_prefix(self, keys: Sequence[PageKey], *, follow: bool = True) -> int:
        """See `PageStore.match_prefix`; other writers are waited for only a moment."""
        if follow:
            self.follow()
        return self.on_this_thread.match_prefix(keys, follow=False)

    def contains(self, keys: Sequence[PageKey], *, follow: bool = True) -> list[bool]:
        """See `PageStore.contains`; other writers are waited for only a moment."""
        if follow:
            self.follow()
        return self.on_this_thread.contains(keys, follow=False)

    def tables(self, *, follow: bool = True) -> tuple[Mapping[bytes, object], Mapping[bytes, object]]:
        """See `PageStore.tables`; other writers are waited for only a moment."""
        if follow:
            self.follow()
        return self.on_this_thread.tables(follow=False)

    def follow(self) -> None:
        """See `PageStore.follow`; where that takes longer than a moment it goes on in the background."""
        inner = self.on_this_thread
        if not self.due() or self._elsewhere:
            inner.follow()
            return
        call = self._lane.start(inner.follow)
        if call is None:
            if not self._lane.full:
                inner.follow()
        elif call.wait(call.started_s + min(_FOLLOW_S, self.deadline_s)):
            call.outcome()

    def due(self) -> bool:
        """See `PageStore.due`."""
        return self.on_this_thread.due()

    def touch(self, keys: Sequence[PageKey]) -> list[bool]:
        """See `PageStore.touch`."""
        return self.on_this_thread.touch(keys)

    @property
    def capacity_nbytes(self) -> int:
        """See `PageStore.capacity_nbytes`."""
        return self.on_this_thread.capacity_nbytes

    def __len__(self) -> int:
        return len(self.on_this_thread)

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
        """See `PageStore.put`."""
        memory = abandonable(host, pages, write=True)
        put = self.on_this_thread.put
        return self._made(
            "put", keys, lambda: put(keys, memory.pool, memory.pages, parents=parents, pin=pin), memory
        )

    def get(self, keys: Sequence[PageKey], host: Pool, pages: ArrayLike) -> list[PageStatus]:
        """See `PageStore.get`."""
        memory = abandonable(host, pages, write=False)
        get = self.on_this_thread.get
        return self._made("get", keys, lambda: get(keys, memory.pool, memory.pages), memory)

    # -- removing and pinning --------------------------------------------------------------------------

    def delete(self, keys: Sequence[PageKey]) -> list[PageStatus]:
        """See `PageStore.delete`."""
        return self._made("delete", keys, lambda: self.on_this_thread.delete(keys))

    def clear(self) -> int:
        """See `PageStore.clear`.

        Raises
        ------
        DeadlineError
            Where storage hangs; the pages may yet go.
        """
        return int(self.begin_clear().answer())

    def begin_clear(self) -> Pending:
        """Begin to `clear`."""
        return self._begin("clear", self.on_this_thread.clear, self._raise)

    def pin(self, keys: Sequence[PageKey]) -> list[PageStatus]:
        """See `PageStore.pin`."""
        return self._made("pin", keys, lambda: self.on_this_thread.pin(keys))

    def unpin(self, keys: Sequence[PageKey]) -> list[PageStatus]:
        """See `PageStore.unpin`."""
        return self._made("unpin", keys, lambda: self.on_this_thread.unpin(keys))

    # -- state -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """See `PageStore.stats`; `calls_in_flight` counts those that hang too."""
        return self.on_this_thread.stats() | {"calls_in_flight": self._lane.in_flight}

    def close(self, timeout: float = 10.0) -> CloseReport:
        """See `PageStore.close`."""
        if self._elsewhere:
            return self.on_this_thread.close(timeout)
        until_s = time.monotonic() + timeout
        report = self.on_this_thread.close(timeout)
        self._lane.close()
        self._lane.join(until_s)
        return report

    @property
    def closed(self) -> bool:
        """See `PageStore.closed`."""
        return self.on_this_thread.closed

    def __repr__(self) -> str:
        return repr(self.on_this_thread)

    # -- inside ----------------------------------------------------------------------------------------

    @property
    def _elsewhere(self) -> bool:
        """Whether this is a child of fork, which has the store's threads no more; the store refuses it."""
        return self._pid != os.getpid()

    def begin(
        self,
        verb: str,
        count: int,
        work: Callable[[], list[PageStatus]],
        memory: Abandonable | None = None,
    ) -> Pending:
        """Begin a call that gives verdicts; the deadline runs from now on.

        Parameters
        ----------
        verb : str
            For the log.
        count : int
            Verdicts that it gives.
        work : callable
            Makes the call, of `on_this_thread`.
        memory : Abandonable, optional
            What it moves.
        """
        return self._begin(verb, work, lambda verdict: [verdict] * count, memory)

    def _made(
        self,
        verb: str,
        keys: Sequence[PageKey],
        work: Callable[[], list[PageStatus]],
        memory: Abandonable | None = None,
    ) -> list[PageStatus]:
        answer: list[PageStatus] = self.begin(verb, len(keys), work, memory).answer()
        return answer

    def _begin(
        self,
        verb: str,
        work: Callable[[], Any],
        late: Callable[[PageStatus], Any],
        memory: Abandonable | None = None,
    ) -> Pending:
        """Begin a call; `late` makes an answer of the reason why there is no other."""
        memory = memory or Abandonable()

        def work_there() -> Any:  # noqa: ANN401 - as `work`
            with memory.around():
                return work()

        def abandon(call: Call) -> None:
            memory.abandon()
            with self._late_lock:
                self._late += 1
            call.leave(lambda: self._returned(memory))
            _LOG.warning("%s: a %s did not return within %g s and is left", self.root, verb, self.deadline_s)

        until_s, call = time.monotonic() + self.deadline_s, None
        hangs = self._late >= _MOST_LATE
        if not (hangs or self._elsewhere):
            call = self._lane.start(work_there)
            hangs = call is None and self._lane.full
        if hangs and not self.closed:
            return Pending(None, until_s, lambda: late(_HANGS), abandon)
        if call is None:  # closed, a child of fork, or no thread is to be had
            return Pending(None, until_s, lambda: self._run_here(work), abandon)
        return Pending(call, until_s, lambda: late(_LATE), abandon)

    def _returned(self, memory: Abandonable) -> None:
        """Take note that a call which was left has returned."""
        with self._late_lock:
            self._late -= 1
        memory.returned()

    def _run_here(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the call returns
        if not self._told and not self.on_this_thread.closed:
            self._told = True
            _LOG.warning("%s: no thread can be started: calls have no deadline.", self.root)
        return work()

    def _raise(self, verdict: PageStatus) -> NoReturn:
        raise DeadlineError(f"{self.root}: {verdict.reason.partition(': ')[2]}.")
