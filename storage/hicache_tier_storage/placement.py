"""Which of several roots a page goes to: by its key, in proportion to their capacities."""

from __future__ import annotations

from bisect import bisect
from itertools import accumulate
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

_RANGE = 1 << 64


class Placement:
    """A home for every key.

    Keys are spread by a hash, so that the pages of any batch lie on all drives. Where a page really is, is
    looked up and not computed: roots may be added and taken away.

    Parameters
    ----------
    weights : sequence of int
        One a root, above 0.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        total = sum(weights)
        self._ends = [end * _RANGE // total for end in accumulate(weights)][:-1]

    def home(self, key: bytes) -> int:
        """Return the number of the root that a new page is stored in."""
        return bisect(self._ends, xxhash.xxh3_64_intdigest(key))
