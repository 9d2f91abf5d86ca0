"""Reading imported pages back, so that they lie in the machine's memory when a server starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .staging import StagedPages
from .units import units_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_tier_storage import PageStore

    from .targets import Target

_BATCH_NBYTES = 16 << 20
_SHARE = 0.8  # of the memory that is free: the rest is the server's


def free_nbytes() -> int:
    """Bytes that may be filled with pages: most of what the host and its cgroup leave."""
    from hicache_tier.memory import memory_limits

    return int(_SHARE * min((limit.available for limit in memory_limits()), default=0))


def read_back(target: Target, store: PageStore, tenants: Sequence[str], most_nbytes: int) -> int:
    """Read pages of a target, those used last first, through the page cache; return how many were good."""
    keys: list[bytes] = []
    scores = [np.zeros(0, np.uint64)]
    for units in units_of(target, tenants):
        keys += units.keys
        scores.append(np.repeat(units.scores, units.pages_each))
    order = np.argsort(np.concatenate(scores), kind="stable")[::-1]
    nbytes = store.geometry.page_nbytes
    order = order[: most_nbytes // nbytes]
    step = max(1, _BATCH_NBYTES // nbytes)
    host = StagedPages(store.geometry, store.layout, np.empty((step, nbytes), np.uint8))
    good = 0
    for at in range(0, len(order), step):
        batch = [keys[i] for i in order[at : at + step].tolist()]
        good += sum(map(bool, store.get(batch, host, range(len(batch)))))
    return good
