"""Openings that end by a deadline, each on a thread of its own."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
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

OPENING = 4  # deadlines that an opening may take: it may have to look at every page
_ENDS_S = 1.0  # the thread of an opening, once that is over


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
    if deadline_s is None:
        return open_it()
    with begun({path: open_it}, OPENING * deadline_s, lambda store: store.close()) as openings:
        store: PageStore = openings[path].answer()
    return BoundedStore(store, deadline_s)


@contextmanager
def begun(
    works: Mapping[Path, Callable[[], Any]], limit_s: float | None, undo: Callable[[Any], object]
) -> Iterator[dict[Path, Pending]]:
    """Begin what is to be done in each directory; what is not answered by the end of the block is left.

    Parameters
    ----------
    works : mapping of Path to callable
    limit_s : float, optional
        From now on; an answer that is late raises `DeadlineError`. None: nothing is begun, but done on the
        caller's thread when its answer is asked for.
    undo : callable
        Takes what a work returns that was left.
    """
    if limit_s is None:
        yield {path: Pending(None, 0.0, work, _nothing) for path, work in works.items()}
        return
    until_s = time.monotonic() + limit_s
    lane = Lane("open", len(works))
    calls: list[Call] = []
    openings: dict[Path, Pending] = {}

    def late(path: Path) -> NoReturn:
        raise DeadlineError(f"{path} was not opened within {limit_s:g} s: storage hangs.")

    def leave(call: Call) -> None:
        call.leave(lambda: call.error or undo(call.result))

    try:
        for path, work in works.items():
            call = lane.start(work)
            calls += [call] if call is not None else []
            otherwise = partial(late, path) if call is not None else work  # no thread can be started
            openings[path] = Pending(call, until_s, otherwise, leave)
        yield openings
    except Exception:
        for call in calls:  # so that what they open is given back before the error is told
            call.wait(until_s)
        raise
    finally:
        lane.close()
        for opening in openings.values():
            opening.leave()
        lane.join(time.monotonic() + _ENDS_S)


def _nothing(_: Call) -> None:
    """Nothing was begun."""
