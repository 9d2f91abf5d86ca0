"""How much of a call is done at a time, so that a deadline costs only what was not done by then."""

from __future__ import annotations

from typing import Final

_FIRST_NBYTES: Final = 64 << 20  # as long as nothing is known of the storage
_SHARE: Final = 0.25  # of the deadline, for one part


class Pace:
    """Pages that storage moves in a quarter of the deadline, by what it did so far.

    A whole batch on storage that is fast; a few pages at a time where it is slow, so that the pages before
    the deadline count.

    Parameters
    ----------
    page_nbytes : int
    deadline_s : float
    """

    __slots__ = ("_deadline_s", "pages")

    def __init__(self, page_nbytes: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self.pages = max(1, _FIRST_NBYTES // page_nbytes)

    def learn(self, moved: int, seconds: float) -> None:
        """Take note of a part: pages that were moved, and how long it took."""
        if moved:
            now = moved / max(seconds, 1e-6) * self._deadline_s * _SHARE
            self.pages = max(1, int((self.pages + now) / 2))
