"""Prefixes over several pools: KV and the side pools that it is of no use without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_tier.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .keys import PageKey
    from .status import PageStatus
    from .store import PageStore


def match_pools(stores: Sequence[PageStore], keys: Sequence[PageKey]) -> int:
    """Count the leading pages that every pool has: `match_prefix`, and the least of it.

    Parameters
    ----------
    stores : sequence of PageStore
        One a required pool, opened with the same `pools`.
    keys : sequence of bytes or hex text
    """
    if not stores:
        raise InvalidArgumentError("a prefix needs at least one pool.")
    count = len(keys)
    for store in stores:
        count = min(count, store.match_prefix(keys[:count]))
    return count


def usable_prefix(verdicts: Sequence[Sequence[PageStatus]]) -> int:
    """Count the leading pages that were loaded in every pool: what counts is known at read time only.

    Parameters
    ----------
    verdicts : sequence of what `get` returned, one a required pool
    """
    if not verdicts:
        raise InvalidArgumentError("a prefix needs at least one pool.")
    return min(next((at for at, good in enumerate(pool) if not good), len(pool)) for pool in verdicts)
