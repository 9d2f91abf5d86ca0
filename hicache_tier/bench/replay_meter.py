"""A store whose calls are timed, whichever it is: bytes, seconds and latencies of the way to the disk."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.host_pool import HostPool
    from hicache_tier.layout import Layout
    from hicache_tier.tier import StoreLike


@dataclass(frozen=True, slots=True)
class StoreCall:
    """One call of the store: what, when it ended (monotonic s), how long it took, and what it moved."""

    verb: str
    ended_s: float
    seconds: float
    pages: int
    nbytes: int


class MeteredStore:
    """Passes every call on to a store and takes down `put` and `get`.

    Optional calls (`touch`, `contains`) are there where the store has them.

    Attributes
    ----------
    calls : list of StoreCall
    """

    def __init__(self, store: StoreLike) -> None:
        self._store = getattr(store, "on_this_thread", store)  # as the tier would take it
        self._lock = threading.Lock()
        self.calls: list[StoreCall] = []

    @property
    def geometry(self) -> KVGeometry:
        """The store's."""
        return self._store.geometry

    @property
    def layout(self) -> Layout:
        """The store's."""
        return self._store.layout

    def put(
        self,
        keys: Sequence[bytes],
        host: HostPool,
        pages: torch.Tensor,
        *,
        parents: Sequence[bytes | None] | None = None,
    ) -> Sequence[object]:
        """Write host pages under their keys."""
        return self._timed("put", lambda: self._store.put(keys, host, pages, parents=parents))

    def get(self, keys: Sequence[bytes], host: HostPool, pages: torch.Tensor) -> Sequence[object]:
        """Read the pages of keys into host pages."""
        return self._timed("get", lambda: self._store.get(keys, host, pages))

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """Count the consecutive keys present, from the start."""
        return self._store.match_prefix(keys)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - what a store may have besides
        if name in {"_store", "on_this_thread"}:  # not there yet; taken already
            raise AttributeError(name)
        return getattr(self._store, name)

    def of(self, verb: str) -> list[StoreCall]:
        """Return the calls of one verb so far."""
        with self._lock:
            return [call for call in self.calls if call.verb == verb]

    def _timed(self, verb: str, call: Callable[[], Sequence[object]]) -> Sequence[object]:
        began_s = time.perf_counter()
        verdicts = call()
        seconds = time.perf_counter() - began_s
        good = sum(map(bool, verdicts))
        done = StoreCall(verb, time.monotonic(), seconds, good, good * self.geometry.page_nbytes)
        with self._lock:
            self.calls.append(done)
        return verdicts
