"""A store in memory whose every call can be delayed, hung, failed or made to lie."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_tier.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.host_pool import HostPool


@dataclass(frozen=True, slots=True)
class Status:
    """Verdict on one page: its truth, and why."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


class MemoryStore:
    """Pages in a dictionary, for tests of what stands above a store.

    Attributes
    ----------
    pages : dict[bytes, bytes]
        What is stored.
    plan : dict[str, callable]
        By verb (`put`, `get`, `match_prefix`): called with the keys before the call does anything; it may
        raise, sleep, or wait (`faults.Gate`).
    refuse : dict[bytes, str]
        Keys whose pages `put` and `get` fail, with the reason.
    claims : set[bytes]
        Keys that `match_prefix` says are there though they are not.
    answer : dict[str, object]
        By verb: what to return instead.
    calls : Counter[str]
        Calls by verb.
    """

    def __init__(self, geometry: KVGeometry, layout: Layout | str) -> None:
        self.geometry = geometry
        self.layout = Layout.parse(layout)
        self.pages: dict[bytes, bytes] = {}
        self.plan: dict[str, Callable[[Sequence[bytes]], object]] = {}
        self.refuse: dict[bytes, str] = {}
        self.claims: set[bytes] = set()
        self.answer: dict[str, Any] = {}
        self.calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def put(
        self,
        keys: Sequence[bytes],
        host: HostPool,
        pages: torch.Tensor,
        *,
        parents: Sequence[bytes | None] | None = None,
    ) -> Sequence[object]:
        """Copy pages out of the host pool, after what the plan says: bytes are taken last."""
        if parents is not None and len(parents) != len(keys):
            raise ValueError(f"{len(parents)} parents for {len(keys)} keys")
        self._begin("put", keys)
        statuses = []
        for key, segments in zip(keys, host.segments(pages), strict=True):
            if key in self.refuse:
                statuses.append(Status(ok=False, reason=self.refuse[key]))
                continue
            data = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in segments)
            with self._lock:
                self.pages.setdefault(key, data)
            statuses.append(Status(ok=True, reason="stored"))
        return self.answer.get("put", statuses)  # type: ignore[no-any-return]

    def get(self, keys: Sequence[bytes], host: HostPool, pages: torch.Tensor) -> Sequence[object]:
        """Copy pages into the host pool."""
        self._begin("get", keys)
        statuses = []
        for key, segments in zip(keys, host.segments(pages), strict=True):
            data = self.pages.get(key)
            if data is None or key in self.refuse:
                statuses.append(Status(ok=False, reason=self.refuse.get(key, "absent")))
                continue
            offset = 0
            for address, nbytes in segments:
                ctypes.memmove(address, data[offset : offset + nbytes], nbytes)
                offset += nbytes
            statuses.append(Status(ok=True, reason="loaded"))
        return self.answer.get("get", statuses)  # type: ignore[no-any-return]

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """Count the consecutive keys that are there, or that `claims` has."""
        self._begin("match_prefix", keys)
        found = 0
        for key in keys:
            if key not in self.pages and key not in self.claims:
                break
            found += 1
        return self.answer.get("match_prefix", found)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Do nothing; a store in memory holds nothing open."""

    def _begin(self, verb: str, keys: Sequence[bytes]) -> None:
        with self._lock:
            self.calls[verb] += 1
        if verb in self.plan:
            self.plan[verb](keys)
