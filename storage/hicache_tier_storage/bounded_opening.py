"""Openings that end by a deadline, each on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from hicache_tier.errors import InvalidArgumentError

from .bounded import BoundedStore, DeadlineError
from .calls import Lane
from .pending import Pending

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from .calls import Call
    from .store import PageStore

_LOG = logging.getLogger(__name__)
OPENING = 4  # deadlines that an opening may take: it may have to look at every page
_ENDS_S = 1.0  # the thread of an opening, once that is over; other openings, once one is refused


def check_deadline(deadline_s: object) -> None:
    """Raise `InvalidArgumentError` unless it is None or a positive, finite number of seconds."""
    number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if deadline_s is not None and not (number and 0 < deadline_s <= threading.TIMEOUT_MAX / OPENING):  # type: ignore[operator]
        raise InvalidArgumentError(
            f"deadline_s must be a positive number of seconds, or None for no deadline, got {deadline_s!r}."
        )


def open_bounded(path: Path, open_it: Callable[[], PageStore], deadline_s: float | None) -> PageStore:
    """Open the store in one directory within the time that openings have, and bound its calls.

    Parameters
    ----------
    path : Path
        Of the root, for errors.
    open_it : callable
    deadline_s : float, optional
        None: neither is bounded.

    Raises
    ------
    DeadlineError
        Where storage hangs. Should the opening end later, the store is closed again.
    """
    limit_s = None if deadline_s is None else OPENING * deadline_s
    with begun({path: open_it}, limit_s, lambda store: store.close()) as openings:
        ((_, opening),) = openings
        store: PageStore = opening.answer()
        return store if deadline_s is None else BoundedStore(store, deadline_s)


class Openings:
    """What is done in each directory; iterating yields each as it is done, those that hang at the end.

    Parameters
    ----------
    most : int
        Directories.
    limit_s : float, optional
        See `begun`.
    undo : callable
        The same.
    """

    def __init__(self, most: int, limit_s: float | None, undo: Callable[[Any], object]) -> None:
        self._limit_s, self._undo = limit_s, undo
        self._until_s = time.monotonic() + (limit_s or 0.0)
        self._lane = Lane("open", most)
        self._calls: list[Call] = []
        self._pending: dict[Path, Pending] = {}
        self._here: list[Path] = []  # on the caller's thread
        self._done_here: list[Any] = []
        self._done: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def begin(self, path: Path, work: Callable[[], Any]) -> None:
        """Begin one; without a limit, or where no thread can be started, it is done when it is asked for."""
        call = None if self._limit_s is None else self._lane.start(partial(self._do, path, work))
        if call is None:
            self._here.append(path)
            self._pending[path] = Pending(None, self._until_s, partial(self._do_here, work), self._leave)
        else:
            self._calls.append(call)
            self._pending[path] = Pending(call, self._until_s, partial(self._late, path), self._leave)

    def __iter__(self) -> Iterator[tuple[Path, Pending]]:
        left = dict(self._pending)
        for path in self._here:
            yield path, left.pop(path)
        with suppress(queue.Empty):
            while left:
                path = self._done.get(timeout=max(0.0, self._until_s - time.monotonic()))
                yield path, left.pop(path)
        yield from left.items()

    def wait(self, seconds: float) -> None:
        """Wait for what is under way, no longer than the limit."""
        until_s = min(self._until_s, time.monotonic() + seconds)
        for call in self._calls:
            call.wait(until_s)

    def leave(self) -> None:
        """Leave what was not answered, and let the threads end."""
        self._lane.close()
        for opening in self._pending.values():
            opening.leave()
        self._lane.join(time.monotonic() + _ENDS_S)

    def give_back(self) -> None:
        """Undo everything, answered or not; what is under way, when it is done."""
        for call in self._calls:
            self._leave(call)
        for result in self._done_here:
            self._give_back(result)

    def _do(self, path: Path, work: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the work returns
        try:
            return work()
        finally:
            self._done.put(path)

    def _do_here(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401 - the same
        self._done_here.append(work())
        return self._done_here[-1]

    def _late(self, path: Path) -> NoReturn:
        raise DeadlineError(f"{path} was not opened within {self._limit_s:g} s: storage hangs.")

    def _leave(self, call: Call) -> None:
        call.leave(lambda: None if call.error else self._give_back(call.result))

    def _give_back(self, result: Any) -> None:  # noqa: ANN401 - the same
        try:
            self._undo(result)
        except Exception:  # noqa: BLE001 - the others are given back all the same
            _LOG.exception("what was opened in vain was not closed cleanly")


@contextmanager
def begun(
    works: Mapping[Path, Callable[[], Any]], limit_s: float | None, undo: Callable[[Any], object]
) -> Iterator[Openings]:
    """Begin what is to be done in each directory; what is not answered by the end of the block is left.

    What was left is undone when it is done. Where the block raises, or a signal does before the last thread
    has ended, everything is undone, answered or not.

    Parameters
    ----------
    works : mapping of Path to callable
    limit_s : float, optional
        From now on; an answer that is late raises `DeadlineError`. None: nothing is begun, but done on the
        caller's thread when its answer is asked for.
    undo : callable
        Takes what a work returned. More than once is as good as once.
    """
    openings = Openings(len(works), limit_s, undo)
    try:
        try:
            for path, work in works.items():
                openings.begin(path, work)
            yield openings
        except Exception:
            openings.wait(_ENDS_S)  # so that what others open is given back before the error is told
            raise
        finally:
            openings.leave()
    except BaseException:
        openings.give_back()
        raise
