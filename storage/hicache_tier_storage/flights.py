"""Pages under way: work that is begun by one call and asked, now and then, how it gets on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FIRST_WAIT_S, _LONGEST_WAIT_S = 50e-6, 1e-3


class Flight(Protocol):
    """Pages under way. A `concurrent.futures.Future` of verdicts is one too."""

    def done(self) -> bool:
        """Whether `result` returns at once; asking moves things on."""

    def result(self) -> list[str]:
        """Wait, and return a verdict for each page."""


class Settled:
    """Pages that were under way, or never were."""

    def __init__(self, verdicts: list[str]) -> None:
        self._verdicts = verdicts

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self) -> list[str]:
        """Return the verdicts."""
        return self._verdicts


class PartByPart:
    """Work in parts, each begun once the one before has ended; the first is begun here.

    Parameters
    ----------
    verdicts : list of str
        One a page, which the work fills in.
    parts : iterator of callables
        Begins a part and yields what tells whether it has ended; is resumed once it has.
    """

    def __init__(self, verdicts: list[str], parts: Iterator[Callable[[], bool]]) -> None:
        self._verdicts, self._parts = verdicts, parts
        self._failure: Exception | None = None
        self._ended = self._next()

    def done(self) -> bool:
        """Whether all parts have ended."""
        while self._ended is not None and self._ended():
            self._ended = self._next()
        return self._ended is None

    def result(self) -> list[str]:
        """Wait, and return the verdicts; raises what the work raised."""
        wait_until(self.done)
        if self._failure is not None:
            raise self._failure
        return self._verdicts

    def _next(self) -> Callable[[], bool] | None:
        try:
            return next(self._parts, None)
        except Exception as failure:  # noqa: BLE001 - raised by `result`
            self._failure = failure
            return None
        except BaseException:  # the work was interrupted: nobody knows what is still under way
            self._verdicts[:] = ["timeout: interrupted"] * len(self._verdicts)
            raise


def wait_until(ended: Callable[[], bool]) -> None:
    """Ask until something has ended, less often the longer it takes: the processor is others' meanwhile."""
    start = now = time.monotonic()
    while not ended():
        time.sleep(min(_LONGEST_WAIT_S, max(_FIRST_WAIT_S, (now - start) / 16)))
        now = time.monotonic()
