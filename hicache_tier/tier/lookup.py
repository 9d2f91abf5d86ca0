"""What the store has, asked without making the engine wait for it."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from .lane import Lane
from .reader import present

if TYPE_CHECKING:
    from .core import Core
    from .reader import Reader


class Lookup:
    """A lane of its own for questions, so that they wait neither for reads nor for writes."""

    def __init__(self, core: Core, reader: Reader) -> None:
        self._core = core
        self._reader = reader
        self._queue: deque[_Question] = deque()
        self.lane = Lane("lookups", core, self._take)

    def ask(self, keys: list[bytes]) -> tuple[int, str | None]:
        """Return how many leading keys the store has, and why it could not be asked; with the lock.

        Waits `lookup_timeout_s` at most, and not at all while an earlier question hangs.
        """
        core, settings = self._core, self._core.settings
        now_s = time.monotonic()
        if any(not c.late and now_s - c.started_s > settings.lookup_timeout_s for c in self.lane.calls):
            return 0, "lookup_busy"
        if not self._reader.lane.due(now_s) or not self.lane.allow(now_s):
            return 0, "breaker_open"
        question = _Question(core, keys)
        self._queue.append(question)
        self.lane.wake()
        until_s = now_s + settings.lookup_timeout_s
        while question.answer is None and not core.closed and core.wait(until_s):
            pass
        if question.answer is None:
            if question in self._queue:
                self._queue.remove(question)
            return 0, "lookup_timeout"
        return question.answer, question.reason

    def _take(self) -> _Question | None:
        return self._queue.popleft() if self._queue else None


class _Question:
    """How many of these keys, from the first on, the store has."""

    def __init__(self, core: Core, keys: list[bytes]) -> None:
        self.answer: int | None = None
        self.reason: str | None = None
        self._core = core
        self._keys = keys

    def run(self) -> object:
        """Ask the store."""
        return present(self._core.store.match_prefix(self._keys), len(self._keys))

    def finish(self, answer: object, error: BaseException | None) -> None:
        """Take the answer; a failure counts as nothing found."""
        found = isinstance(answer, int) and error is None
        self.answer = int(answer) if isinstance(answer, int) and found else 0
        self.reason = None if found else "lookup_failed"

    def expire(self) -> None:
        """Do nothing: whoever asked waits no more."""
