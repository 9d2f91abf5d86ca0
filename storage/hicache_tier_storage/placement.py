"""Which of several roots a page goes to, by its key, and what share of the capacity each root has."""

from __future__ import annotations

import shutil
from bisect import bisect
from itertools import accumulate
from typing import TYPE_CHECKING

import xxhash

from hicache_tier.errors import HiCacheTierError, InvalidArgumentError

from .medium import existing_parent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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


def distinct_roots(paths: Sequence[Path]) -> list[Path]:
    """Refuse an empty list, and directories of which one is or contains another.

    Raises
    ------
    InvalidArgumentError
    """
    if not paths:
        raise InvalidArgumentError("root must name one directory at least, got an empty list.")
    real = [path.resolve() for path in paths]
    for at, one in enumerate(real):
        for other in real[at + 1 :]:
            if one == other or one in other.parents or other in one.parents:
                raise InvalidArgumentError(f"roots must lie apart, got {one} and {other}.")
    return list(paths)


def split_capacity(paths: Sequence[Path], total_nbytes: int | None) -> dict[Path, int | None]:
    """Share a capacity out by the sizes of the file systems; None: each root's own default."""
    if total_nbytes is None:
        return dict.fromkeys(paths)
    sizes = [_size(path) for path in paths]
    known = [size for size in sizes if size]
    middle = sum(known) // len(known) if known else 1
    sizes = [size or middle for size in sizes]
    return {path: total_nbytes * size // sum(sizes) for path, size in zip(paths, sizes, strict=True)}


def _size(path: Path) -> int:
    """Return the bytes of a file system, 0 where they cannot be had: opening the root says what is wrong."""
    try:
        return shutil.disk_usage(existing_parent(path)).total
    except (OSError, HiCacheTierError):
        return 0
