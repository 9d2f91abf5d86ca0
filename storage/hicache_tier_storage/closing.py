"""The end of an open store, within a bound whatever storage does."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What a store left behind when it was closed.

    Attributes
    ----------
    abandoned_calls : int
        Calls that had not returned. The last of them to return lets go of the files and of the partition.
    synced : bool
        Whether the partition was synced and stated clean. Where it was not, it is as a killed process would
        have left it: nothing that was committed is lost, but by power loss.
    """

    abandoned_calls: int = 0
    synced: bool = True

    @property
    def clean(self) -> bool:
        """Whether nothing was left behind."""
        return self.synced and not self.abandoned_calls


class Closer:
    """Runs what closes a store on a thread of its own, so that nobody waits for storage that hangs.

    Parameters
    ----------
    work : callable (until_s)
        Does it, by a time on the monotonic clock as far as it can, and returns the report.
    otherwise : callable
        Returns the report where that has not ended in time.
    """

    def __init__(self, work: Callable[[float], CloseReport], otherwise: Callable[[], CloseReport]) -> None:
        self._work, self._otherwise = work, otherwise
        self._error: BaseException | None = None
        self._report: CloseReport | None = None
        self._thread: threading.Thread | None = None
        self._until_s = 0.0

    def start(self, timeout: float) -> None:
        """Begin; there are `timeout` seconds."""
        self._until_s = time.monotonic() + timeout
        self._thread = threading.Thread(target=self._run, name="hct-close", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the process may have no more threads
            self._thread = None
            self._run()

    def result(self) -> CloseReport:
        """Return the report once the time is up at the latest; raises what the work raised."""
        if self._thread is not None:
            self._thread.join(max(0.0, self._until_s - time.monotonic()))
        if self._error is not None:
            raise self._error
        return self._report or self._otherwise()

    def _run(self) -> None:
        try:
            self._report = self._work(self._until_s)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self._error = error
