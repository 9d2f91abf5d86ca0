"""Which of several roots a page goes to, by its key, and what share of the capacity each root has."""

from __future__ import annotations

import os
import shutil
from bisect import bisect
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Self

import xxhash

from hicache_tier.errors import HiCacheTierError, InvalidArgumentError

from .medium import existing_parent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


@dataclass(frozen=True, slots=True)
class Look:
    """Where a directory lies.

    Attributes
    ----------
    real : Path
        Without links.
    nbytes : int
        Of its file system; 0 where that cannot be told: opening the root says what is wrong.
    """

    real: Path
    nbytes: int

    @classmethod
    def at(cls, path: Path) -> Self:
        """Look at a directory, or where it will be."""
        nbytes = 0
        with suppress(OSError, HiCacheTierError):
            nbytes = shutil.disk_usage(existing_parent(path)).total
        return cls(Path(os.path.realpath(path)), nbytes)  # `Path.resolve` raises for links in a circle


def refuse_nested(looks: Mapping[Path, Look]) -> None:
    """Refuse directories of which one is or contains another.

    Raises
    ------
    InvalidArgumentError
    """
    for one, other in combinations(looks.values(), 2):
        if one.real.is_relative_to(other.real) or other.real.is_relative_to(one.real):
            raise InvalidArgumentError(f"roots must lie apart, got {one.real} and {other.real}.")


def split_capacity(sizes: Mapping[Path, int], total_nbytes: int | None) -> dict[Path, int | None]:
    """Share a capacity out by the sizes of the file systems, 0 where one is not known.

    None: each root's own default.
    """
    if total_nbytes is None:
        return dict.fromkeys(sizes)
    known = [size for size in sizes.values() if size]
    middle = sum(known) // len(known) if known else 1
    weights = {path: size or middle for path, size in sizes.items()}
    return {path: total_nbytes * weight // sum(weights.values()) for path, weight in weights.items()}
