"""When a transfer is about due, by how long the last ones took."""

from __future__ import annotations

LEAST_NBYTES = 1 << 20
"""Shorter transfers take some tenths of a millisecond however many bytes they have: they have no pace."""
_SHARE, _LONGEST_NAP_S = 0.8, 0.05
_MOST_GROWTH = 1.25
"""By which the pace may grow at once: what held up one transfer need not hold up the next."""


class Pace:
    """Seconds a byte of the transfers of one kind, of late."""

    def __init__(self) -> None:
        self._a_byte_s = 0.0

    def nap_s(self, nbytes: int) -> float:
        """Return for how long nobody need ask after a transfer of so many bytes has begun; 0 if unknown."""
        return 0.0 if nbytes < LEAST_NBYTES else min(_LONGEST_NAP_S, nbytes * self._a_byte_s * _SHARE)

    def learn(self, nbytes: int, seconds: float, *, overslept: bool) -> None:
        """Take note of how long one took; `overslept` if it had ended when it was first asked after a nap.

        How much earlier that was nobody knows: the next is asked much sooner.
        """
        if nbytes < LEAST_NBYTES:
            return
        latest_s, known_s = seconds / nbytes, self._a_byte_s
        if overslept:
            latest_s /= 2
        elif known_s and latest_s > known_s:
            latest_s = min(known_s * _MOST_GROWTH, (3 * known_s + latest_s) / 4)
        self._a_byte_s = latest_s
