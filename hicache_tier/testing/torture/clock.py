"""A wall clock that jumps, for one process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

_REAL_S, _REAL_NS = time.time, time.time_ns
_JUMPS_S = (0.0, 0.0, 3.0, -3.0, 3600.0, -3600.0, 400 * 86_400.0, -400 * 86_400.0)


class JumpingClock:
    """Takes the place of `time.time` and `time.time_ns`; only its jumps differ from them.

    Parameters
    ----------
    random : Random
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._ahead_s = 0.0
        time.time = lambda: _REAL_S() + self._ahead_s
        time.time_ns = lambda: _REAL_NS() + int(self._ahead_s * 1e9)

    def jump(self) -> None:
        """Go somewhere else."""
        self._ahead_s = self._random.choice(_JUMPS_S)
