"""Host tier and store behind one set of verbs, for engines without a hierarchical cache of their own."""

from __future__ import annotations

from .lock import PageLock
from .policy import PrefetchPolicy, Settings, TierOptions, WritePolicy
from .prefetch import Prefetch
from .shutdown import CloseReport
from .store import StoreLike
from .tier import Match, Tier

__all__ = [
    "CloseReport",
    "Match",
    "PageLock",
    "Prefetch",
    "PrefetchPolicy",
    "Settings",
    "StoreLike",
    "Tier",
    "TierOptions",
    "WritePolicy",
]
