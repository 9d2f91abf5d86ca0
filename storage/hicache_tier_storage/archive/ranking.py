"""Which pages are worth most: whole prefixes, those of the best page first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier_storage.chains import Chains

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(slots=True)
class Ranking:
    """Pages by the first 8 bytes of their keys, each once.

    Attributes
    ----------
    heads : uint64 [m]
        Ascending.
    score : uint64 [m]
        Of the best page that continues it, itself included, so that no page outranks those before it.
    depth : int64 [m]
        Place in its chain; 0 where no prefix leads there.
    nbytes : int64 [m]
        Payload of all pages of that name.
    """

    heads: NDArray[np.uint64]
    score: NDArray[np.uint64]
    depth: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        heads: NDArray[np.uint64],
        parents: NDArray[np.uint64],
        scores: NDArray[np.uint64],
        nbytes: NDArray[np.int64],
    ) -> Ranking:
        """Rank pages, one entry each; those of one name are taken together."""
        unique, first, inverse = np.unique(heads, return_index=True, return_inverse=True)
        score = np.zeros(len(unique), np.uint64)
        np.maximum.at(score, inverse, scores)
        total = np.zeros(len(unique), np.int64)
        np.add.at(total, inverse, nbytes)
        above = parents[first]
        depth = Chains.build(unique, above).depth
        _lift(unique, above, depth, score)
        return cls(unique, score, depth, total)

    def order(self, heads: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the order of pages of these heads, best first, each page after those before it."""
        at = np.searchsorted(self.heads, heads)
        depth, score = self.depth[at], self.score[at]
        return np.lexsort((depth, np.iinfo(np.uint64).max - score, depth == 0))

    @staticmethod
    def chosen(rankings: list[Ranking], max_nbytes: int) -> list[NDArray[np.uint64]]:
        """Return the heads of the best pages of each ranking, of `max_nbytes` in all at most."""
        score = np.concatenate([one.score for one in rankings])
        depth = np.concatenate([one.depth for one in rankings])
        nbytes = np.concatenate([one.nbytes for one in rankings])
        order = np.lexsort((depth, np.iinfo(np.uint64).max - score, depth == 0))
        chosen = np.zeros(len(order), np.bool_)
        chosen[order[np.cumsum(nbytes[order]) <= max_nbytes]] = True
        ends = np.cumsum([len(one.heads) for one in rankings])[:-1]
        return [one.heads[part] for one, part in zip(rankings, np.split(chosen, ends), strict=True)]


def _lift(
    heads: NDArray[np.uint64],
    parents: NDArray[np.uint64],
    depth: NDArray[np.int64],
    score: NDArray[np.uint64],
) -> None:
    """Give every page the best score of the pages that continue it, deepest first."""
    order = np.argsort(depth, kind="stable")
    edges = np.searchsorted(depth[order], np.arange(1, int(depth.max(initial=0)) + 2))
    for level in range(len(edges) - 1, 1, -1):
        rows = order[edges[level - 1] : edges[level]]
        np.maximum.at(score, np.searchsorted(heads, parents[rows]), score[rows])
