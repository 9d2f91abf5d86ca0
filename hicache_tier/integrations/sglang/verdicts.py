"""Verdicts on many pages, which are mostly one and the same object."""

from __future__ import annotations

from collections import Counter
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_tier_storage import PageStatus


def kinds_of(statuses: Sequence[PageStatus]) -> dict[str, int]:
    """Count verdicts by kind."""
    statuses = list(statuses)  # a call that is late may note more of them meanwhile
    if statuses and all(map(is_, statuses, repeat(statuses[0]))):  # `==` would compare them as numbers
        return {statuses[0].kind: len(statuses)}
    kinds: Counter[str] = Counter()
    by_identity = dict(zip(map(id, statuses), statuses, strict=True))
    for identity, count in Counter(map(id, statuses)).items():
        kinds[by_identity[identity].kind] += count
    return kinds


def moved(kinds: Mapping[str, int]) -> int:
    """Count the pages whose bytes were moved: loaded, or stored just now."""
    return kinds.get("loaded", 0) + kinds.get("stored", 0)
