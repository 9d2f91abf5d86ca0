"""What stands for the engine: asks the tier for each prompt's pages, checks them, computes the rest."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_tier.tier import Tier

    from .device_cache import DeviceCache
    from .replay_pages import KeyedPages


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request.

    Attributes
    ----------
    ended_s : float
        Monotonic seconds at its end.
    pages : int
        Of the prompt.
    device, host, store : int
        Leading pages found there, in this order.
    wrong : int
        Loaded pages that did not hold the bytes of their keys.
    match_s, load_s, insert_s : float
        Seconds that the engine waited: for `match`, for `prefetch` and `load` (0 where nothing was to be
        loaded), for `insert`.
    """

    ended_s: float
    pages: int
    device: int
    host: int
    store: int
    wrong: int
    match_s: float
    load_s: float
    insert_s: float

    @property
    def hits(self) -> int:
        """Pages that need not be computed."""
        return self.device + self.host + self.store


class ReplayEngine:
    """Serves prompts one after another through a tier.

    Parameters
    ----------
    tier : Tier
    pages : KeyedPages
    cache : DeviceCache
    """

    def __init__(self, tier: Tier, pages: KeyedPages, cache: DeviceCache) -> None:
        self._tier = tier
        self._pages = pages
        self._cache = cache

    def serve(self, keys: Sequence[bytes]) -> Served:
        """Have a prompt's pages on the device: found there, loaded, or computed and inserted.

        Every page that was loaded is compared with what its key says. A wrong one counts, is computed again,
        and ends the hits there.
        """
        resident = self._cache.resident(keys)
        numbers = self._cache.take(keys)
        rest, places = keys[resident:], numbers[resident:]
        began_s = time.perf_counter()
        match = self._tier.match(rest)
        match_s = time.perf_counter() - began_s
        self._pages.blank(places[: match.pages])
        began_s = time.perf_counter()
        loaded = self._load(rest[: match.pages], places[: match.pages], fetch=match.store_pages > 0)
        load_s = time.perf_counter() - began_s if match.pages else 0.0
        wrong = self._pages.wrong(places[:loaded], rest[:loaded])
        good = wrong[0] if wrong else loaded
        self._pages.compute(places[good:], rest[good:])
        began_s = time.perf_counter()
        if rest:
            parent = keys[resident - 1] if resident else None
            self._tier.insert(rest, self._pages.pool, places, parent=parent)
        insert_s = time.perf_counter() - began_s
        self._cache.release(keys, numbers)
        from_host = min(match.host_pages, good)
        return Served(
            time.monotonic(), len(keys), resident, from_host, good - from_host, len(wrong),
            match_s, load_s, insert_s,
        )  # fmt: skip

    def _load(self, keys: Sequence[bytes], places: Sequence[int], *, fetch: bool) -> int:
        """Bring leading pages to the device; return how many came."""
        if not keys:
            return 0
        if fetch:
            self._tier.prefetch(keys).wait()
        with self._tier.lock(keys):
            return self._tier.load(keys, self._pages.pool, list(places))
