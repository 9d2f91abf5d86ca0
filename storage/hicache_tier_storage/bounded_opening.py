"""Openings that end by a deadline, of stores whose calls do."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from hicache_tier.errors import InvalidArgumentError

from .bounded import BoundedStore, DeadlineError
from .bounded_roots import BoundedRoots
from .calls import Lane
from .roots import SeveralRoots

if TYPE_CHECKING:
    from collections.abc import Callable

    from .store import PageStore

OPENING = 4  # deadlines that an opening may take: it may have to look at every page
_ENDS_S = 1.0  # the thread of an opening, once that is over


def check_deadline(deadline_s: object) -> None:
    """Raise `InvalidArgumentError` unless it is None or a positive, finite number of seconds."""
    number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if deadline_s is not None and not (number and 0 < deadline_s <= threading.TIMEOUT_MAX / OPENING):  # type: ignore[operator]
        raise InvalidArgumentError(
            f"deadline_s must be a positive number of seconds, or None for no deadline, got {deadline_s!r}."
        )


def open_bounded(open_it: Callable[[], PageStore], deadline_s: float | None, name: str) -> PageStore:
    """Open a store within the time that openings have, and bound its calls.

    Parameters
    ----------
    open_it : callable
    deadline_s : float, optional
        None: neither is bounded.
    name : str
        Of the root, for errors.

    Raises
    ------
    DeadlineError
        Where storage hangs. Should the opening end later, the store is closed again.
    """
    if deadline_s is None:
        return open_it()
    store = _opened(open_it, deadline_s, name)
    if isinstance(store, SeveralRoots):
        return BoundedRoots(store, deadline_s)
    return BoundedStore(store, deadline_s)


def _opened(open_it: Callable[[], PageStore], deadline_s: float, name: str) -> PageStore:
    lane = Lane("open", 1)
    call = lane.start(open_it)
    lane.close()
    if call is None:  # no thread can be started
        return open_it()
    in_time = False
    try:
        in_time = call.wait(call.started_s + OPENING * deadline_s)
    finally:
        if not in_time:
            call.leave(lambda: call.error or call.result.close())
    if not in_time:
        raise DeadlineError(f"{name} was not opened within {OPENING * deadline_s:g} s: storage hangs.")
    lane.join(time.monotonic() + _ENDS_S)
    store: PageStore = call.outcome()
    return store
