"""The pages that a partition holds, as told by the process that writes it, in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .pages import NUMBERS

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_HEADER_NBYTES = 4096


class Ledger:
    """What a partition held after the last operation that its writer finished. Whoever writes it has it.

    Parameters
    ----------
    path : Path
        A file, in memory best; it is made where there is none.

    Attributes
    ----------
    at_risk : bool [NUMBERS]
        Pages that the operation under way may remove.
    """

    def __init__(self, path: Path) -> None:
        nbytes = _HEADER_NBYTES + 3 * NUMBERS
        raw = np.memmap(path, np.uint8, "r+" if path.exists() else "w+", shape=nbytes)
        self._which = raw[:8].view(np.int64)
        lists = raw[_HEADER_NBYTES:].view(np.bool_).reshape(3, NUMBERS)
        self._held = lists[:2]
        self.at_risk: NDArray[np.bool_] = lists[2]

    @property
    def held(self) -> NDArray[np.bool_]:
        """One truth a page number."""
        held: NDArray[np.bool_] = self._held[self._which[0]]
        return held

    @property
    def promised(self) -> NDArray[np.int64]:
        """Numbers of the pages that must be there, whatever the operation under way has come to."""
        return np.flatnonzero(self.held & ~self.at_risk)

    def tell(self, numbers: NDArray[np.int64]) -> None:
        """State what is held now, in one step; nothing is at risk any more."""
        other = 1 - int(self._which[0])
        self._held[other] = False
        self._held[other][numbers] = True
        self._which[0] = other
        self.at_risk[:] = False
