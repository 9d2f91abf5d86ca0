"""Verdicts on many pages, which are mostly one and the same object."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_tier_storage import PageStatus


def kinds_of(statuses: Sequence[PageStatus]) -> Counter[str]:
    """Count verdicts by kind."""
    kinds: Counter[str] = Counter()
    statuses = list(statuses)  # a call that is late may note more of them meanwhile
    by_identity = dict(zip(map(id, statuses), statuses, strict=True))
    for identity, count in Counter(map(id, statuses)).items():
        kinds[by_identity[identity].kind] += count
    return kinds


def moved(statuses: Sequence[PageStatus]) -> int:
    """Count the pages whose bytes were moved: loaded, or stored just now."""
    kinds = kinds_of(statuses)
    return kinds["loaded"] + kinds["stored"]
