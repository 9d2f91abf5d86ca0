"""Keeping a store's memory of pages that are used in the host tier, and the tier's of what the store has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .index import State
from .store import optional_call, truths

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .core import Core
    from .index import Entry

_IDLE_S = 1.0  # how long uses wait for a write to go along with


class Uses:
    """Uses of stored pages that the store has not been told of, once a page.

    They are told right before a write, which is what could evict the pages, and otherwise once a second.
    """

    def __init__(self, core: Core, lost: Callable[[Sequence[Entry]], None]) -> None:
        self._core = core
        self._lost = lost
        self._touch = optional_call(core.store, "touch")
        self._runs: list[list[Entry]] = []
        self._count = 0
        self._due_s = 0.0

    def note(self, entries: Sequence[Entry]) -> bool:
        """Take note that these entries, in prefix order, were used; say whether they are the first."""
        run = [entry for entry in entries if entry.stored] if self._touch is not None else []
        if not run:
            return False
        first = not self._runs
        if first:
            self._due_s = time.monotonic() + _IDLE_S
        self._runs.append(run)
        self._count += len(run)
        if self._count > 2 * len(self._core.index) + 1024:
            self._runs = [self._distinct()]
            self._count = len(self._runs[0])
        return first

    def due_in_s(self) -> float | None:
        """Seconds until they are told without a write; None where there are none."""
        return max(0.0, self._due_s - time.monotonic()) if self._runs else None

    def take(self) -> Question | None:
        """Return a call that tells them."""
        if self._touch is None or not self._runs:
            return None
        entries = [entry for entry in self._distinct() if entry.state is State.READY and entry.stored]
        self._runs, self._count = [], 0
        return Question(self._touch, entries, self._lost) if entries else None

    def _distinct(self) -> list[Entry]:
        """Return the entries used, the last run first, each in prefix order."""
        return list(dict.fromkeys(entry for run in reversed(self._runs) for entry in run))


class Question:
    """A call that says which pages of entries are in the store; the others do not count as stored any more.

    Attributes
    ----------
    over : bool
        Whether there is nothing to wait for any more.
    """

    def __init__(
        self,
        call: Callable[[Sequence[bytes]], object],
        entries: list[Entry],
        lost: Callable[[Sequence[Entry]], None],
    ) -> None:
        self.over = False
        self._call = call
        self._entries = entries
        self._lost = lost

    def run(self) -> object:
        """Ask the store."""
        return truths(self._call([entry.key for entry in self._entries]), len(self._entries))

    def finish(self, answer: object, error: BaseException | None) -> None:
        """Take the answer; without one, what was believed is believed."""
        self.over = True
        if isinstance(answer, list) and error is None:
            lost = [entry for entry, there in zip(self._entries, answer, strict=True) if not there]
            for entry in lost:
                entry.stored = False
            self._lost([entry for entry in lost if entry.state is State.READY])

    def expire(self) -> None:
        """Have nobody wait any longer."""
        self.over = True
