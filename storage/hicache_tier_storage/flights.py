"""Pages under way: work that is begun by one call and asked, now and then, how it gets on."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_LOG = logging.getLogger(__name__)
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

    run = result


class PartByPart:
    """Work in parts, each begun once the one before has ended; the first is begun here.

    Where the work raises after that, nobody knows what of it is still under way: pages that have no verdict
    by then have `timeout`. What it raises before is raised here, and says that nothing was begun.

    Parameters
    ----------
    verdicts : list of str
        One a page, which the work fills in.
    parts : generator of callables
        Begins a part and yields what tells whether it has ended; is resumed once it has. What asking raises,
        or an interrupt of `run`, is thrown into it: it begins nothing more, and waits for what it began.
    """

    def __init__(self, verdicts: list[str], parts: Generator[Callable[[], bool], None, None]) -> None:
        self._verdicts, self._parts = verdicts, parts
        self._ended = next(parts, None)

    def done(self) -> bool:
        """Whether all parts have ended."""
        while self._ended is not None:
            try:
                if not self._ended():
                    return False
            except Exception as failure:  # noqa: BLE001 - of a package, which may raise anything
                self._go_on(partial(self._parts.throw, failure))
            else:
                self._go_on(partial(next, self._parts, None))
        return True

    def result(self) -> list[str]:
        """Wait, and return the verdicts; one that was interrupted may be called again."""
        wait_until(self.done)
        return self._verdicts

    def run(self) -> list[str]:
        """Wait, and return the verdicts; an interrupt ends the work."""
        try:
            return self.result()
        except BaseException as interrupt:
            if self._ended is not None:
                self._go_on(partial(self._parts.throw, interrupt))
            raise

    def _go_on(self, resume: Callable[[], Callable[[], bool] | None]) -> None:
        try:
            self._ended = resume()
        except Exception as failure:  # noqa: BLE001 - of a package, which may raise anything
            _LOG.error("pages are left under way", exc_info=failure)
            self._lose(f"{type(failure).__name__}: {failure}")
        except BaseException:
            self._lose("interrupted")
            raise

    def _lose(self, why: str) -> None:
        self._ended = None
        self._verdicts[:] = [verdict or f"timeout: {why}" for verdict in self._verdicts]


def wait_until(ended: Callable[[], bool], since_s: float | None = None) -> None:
    """Ask until something has ended, less often the longer it takes: the processor is others' meanwhile.

    `since_s` is when it began, on the monotonic clock, where that was not just now.
    """
    now = time.monotonic()
    start = now if since_s is None else since_s
    while not ended():
        time.sleep(min(_LONGEST_WAIT_S, max(_FIRST_WAIT_S, (now - start) / 16)))
        now = time.monotonic()


def wait_through(ended: Callable[[], bool]) -> None:
    """Wait as `wait_until` does, however often that is interrupted: its caller raises an interrupt already.

    What is asked must have a bound of its own.
    """
    while True:
        try:
            wait_until(ended)
        except BaseException:  # noqa: BLE001, S112 - another interrupt
            continue
        return
