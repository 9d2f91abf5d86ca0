"""Which pages are imported where there is no room for all: whole prefixes, the same of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .ranking import Ranking
from .units import heads_of_units, units_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hicache_tier_storage import PageStore

    from .targets import Target
    from .units import Units


def stored_units(store: PageStore | None, units: Units) -> NDArray[np.bool_]:
    """Tell for each unit whether the store has all of its pages; none has them where there is no store."""
    if store is None:
        return np.zeros(len(units), np.bool_)
    there = np.array(store.contains(units.keys), np.bool_).reshape(len(units), units.pages_each)
    every: NDArray[np.bool_] = np.logical_and.reduce(there, axis=1)
    return every


class Choice:
    """Shares the room of a root out among the targets that are still to come, by their sizes.

    Parameters
    ----------
    targets : list of Target
    tenants : sequence of str
    """

    def __init__(self, targets: list[Target], tenants: Sequence[str]) -> None:
        self._targets = targets
        self._tenants = tenants
        self._rankings: dict[str, Ranking] = {}
        self._left_nbytes = sum(target.nbytes for target in targets)

    def of(self, target: Target, store: PageStore | None, room_pages: int) -> NDArray[np.uint64] | None:
        """Return the heads of the units to take, None where all that are missing fit.

        The targets are asked for in their order, each once.
        """
        page_nbytes = target.shape.geometry.page_nbytes
        enough = self._left_nbytes <= room_pages * page_nbytes
        share = room_pages if enough else room_pages * target.nbytes // self._left_nbytes
        self._left_nbytes -= target.nbytes
        if enough:
            return None
        heads, missing = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
        for units in units_of(target, self._tenants):
            heads.append(heads_of_units(units)[0])
            missing.append(~stored_units(store, units) * units.pages_each)
        wanted = np.concatenate(missing)
        if int(wanted.sum()) <= share:
            return None
        ranking = self._ranking(target.identity.namespace)
        pages = np.zeros(len(ranking.heads), np.int64)
        np.add.at(pages, np.searchsorted(ranking.heads, np.concatenate(heads)), wanted)
        return Ranking.chosen([Ranking(ranking.heads, ranking.score, ranking.depth, pages)], share)[0]

    def _ranking(self, namespace: str) -> Ranking:
        """Rank the units of all targets of a namespace together."""
        if namespace not in self._rankings:
            columns = [
                (*heads_of_units(units), units.scores)
                for target in self._targets
                if target.identity.namespace == namespace
                for units in units_of(target, self._tenants)
            ]
            heads, parents, scores = (np.concatenate(column) for column in zip(*columns, strict=True))
            self._rankings[namespace] = Ranking.of(heads, parents, scores, np.ones(len(heads), np.int64))
        return self._rankings[namespace]
