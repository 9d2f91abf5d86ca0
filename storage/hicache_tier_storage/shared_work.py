"""Parts of a batch that several threads move, and who is at it."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Part = TypeVar("Part")


class SharedWork(Generic[Part]):
    """Parts that several threads move.

    A helper that comes late, after `end`, does nothing: the memory and the descriptors are not its any more.

    Parameters
    ----------
    work : callable
        Takes parts from an iterator and moves them until there are no more.
    parts : iterable

    Attributes
    ----------
    parts : iterator
        What nobody has taken yet.
    failure : BaseException or None
        What a helper's work raised.
    """

    def __init__(self, work: Callable[[Iterator[Part]], None], parts: Iterable[Part]) -> None:
        self.parts = iter(parts)
        self.failure: BaseException | None = None
        self._work: Callable[[Iterator[Part]], None] | None = work
        self._changed = threading.Condition(threading.Lock())
        self._busy = 0

    def help(self) -> None:
        """Move parts until there are no more."""
        with self._changed:
            work = self._work
            if work is None:
                return
            self._busy += 1
        try:
            work(self.parts)
        except BaseException as failure:  # noqa: BLE001 - the caller raises it
            self.failure = failure
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Let nobody take another part, and wait for those under way, however often that is interrupted."""
        interrupted: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._work = None
                    deque(self.parts, 0)
                    self._changed.wait_for(lambda: not self._busy)
                break
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupted = error
        if interrupted is not None:
            raise interrupted
