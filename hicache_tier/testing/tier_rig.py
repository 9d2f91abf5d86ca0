"""A tier with a device pool whose pages are written and checked by their key."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch

from hicache_tier.device_pool import DevicePool
from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool
from hicache_tier.keys import page_keys
from hicache_tier.tier import Tier
from hicache_tier.transfer import backup, load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_tier.tier import StoreLike, TierOptions

GEOMETRY = KVGeometry.mha(num_layers=2, num_kv_heads=2, head_dim=4, dtype="int8", page_tokens=2)
_NOISE = 77


def chain(seed: int, pages: int) -> list[bytes]:
    """Return the keys of a prompt of so many pages; a longer one of the same seed goes on from it."""
    tokens = np.random.default_rng(seed).integers(0, 50_000, pages * GEOMETRY.page_tokens)
    return page_keys(tokens, GEOMETRY.page_tokens)


class Rig:
    """A tier over a store of `GEOMETRY`; every page's bytes follow from its key, so any mix-up is seen.

    Parameters
    ----------
    store : PageStore
    host_pages, device_pages : int
    **options
        As for `Tier`.
    """

    def __init__(
        self,
        store: StoreLike,
        host_pages: int = 16,
        device_pages: int = 64,
        **options: Unpack[TierOptions],
    ) -> None:
        self.store = store
        self.host = HostPool(GEOMETRY, store.layout, host_pages, pinned=False)
        self.device = DevicePool.empty(GEOMETRY, device_pages)
        self.scratch = DevicePool.empty(GEOMETRY, device_pages)
        self.tier = Tier(self.host, store, **options)

    def compute(self, keys: Sequence[bytes]) -> range:
        """Write the pages of keys to the device, as a model would; return their numbers."""
        for page, key in enumerate(keys):
            for tensor, value in zip(_page(self.device, page), _content(key), strict=True):
                tensor.copy_(value)
        return range(len(keys))

    def insert(self, keys: Sequence[bytes], parent: bytes | None = None) -> int:
        """Compute and insert."""
        return self.tier.insert(keys, self.device, self.compute(keys), parent=parent)

    def load(self, keys: Sequence[bytes]) -> int:
        """Load into pages of noise; check the bytes of those loaded, and that the others are untouched."""
        for tensor in (t for layer in self.scratch.layers for t in layer):
            tensor.fill_(_NOISE)
        count = self.tier.load(keys, self.scratch, range(len(keys)))
        self.check(self.scratch, keys, count)
        return count

    def check(self, pool: DevicePool, keys: Sequence[bytes], count: int) -> None:
        """Check that the first `count` pages of a device pool are those of keys, and the rest noise."""
        for page, key in enumerate(keys):
            for tensor, value in zip(_page(pool, page), _content(key), strict=True):
                expected = value if page < count else torch.full_like(value, _NOISE)
                assert torch.equal(tensor, expected), f"page {page}, key {key.hex()}: wrong bytes"

    def check_stored(self, keys: Sequence[bytes]) -> list[bool]:
        """Read the store past the tier; say which pages it has, and check the bytes of those."""
        with HostPool(GEOMETRY, self.host.layout, max(1, len(keys)), pinned=False) as pool:
            statuses = self.store.get(keys, pool, torch.arange(len(keys)))
            for page, (key, status) in enumerate(zip(keys, statuses, strict=True)):
                if status:
                    load(pool, self.scratch, [page], [0])
                    self.check(self.scratch, [key], 1)
            return [bool(status) for status in statuses]

    def preload(self, keys: Sequence[bytes]) -> None:
        """Put pages into the store past the tier."""
        with HostPool(GEOMETRY, self.host.layout, len(keys), pinned=False) as pool:
            pages = torch.arange(len(keys))
            backup(self.device, pool, self.compute(keys), pages)
            assert all(self.store.put(keys, pool, pages, parents=[None, *keys[:-1]]))

    def account(self) -> dict[str, Any]:
        """Return the statistics, after checking that every host page has exactly one place."""
        stats = self.tier.stats()
        host = stats["host"]
        assert host["free_pages"] + host["owned_pages"] == host["total_pages"], host
        assert host["other_pages"] == 0, host
        parts = host["ready_pages"] + host["filling_pages"] + host["detached_pages"]
        assert host["owned_pages"] == parts, host
        return stats

    def until(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float = 5.0) -> dict[str, Any]:
        """Wait for the statistics to meet a condition; return them."""
        end_s = time.monotonic() + timeout_s
        while not condition(self.tier.stats()):
            assert time.monotonic() < end_s, self.tier.stats()
            time.sleep(0.002)
        return self.account()

    def idle(self) -> dict[str, Any]:
        """Wait until nothing waits and nothing is with the store; return the statistics."""
        return self.until(
            lambda stats: (
                not any(stats["queues"].values())
                and not any(lane["calls_in_flight"] for lane in stats["lanes"].values())
            )
        )


def _page(pool: DevicePool, page: int) -> list[torch.Tensor]:
    """Return the rows of one page: K and V of each layer."""
    rows = slice(page * GEOMETRY.page_tokens, (page + 1) * GEOMETRY.page_tokens)
    return [tensor[rows] for layer in pool.layers for tensor in layer]


def _content(key: bytes) -> list[torch.Tensor]:
    """Return the bytes that belong to a key, one tensor for each that `_page` returns."""
    random = np.random.default_rng(list(key))
    shape = (GEOMETRY.page_tokens, GEOMETRY.components[0].heads, GEOMETRY.components[0].width)
    count = GEOMETRY.num_layers * len(GEOMETRY.components)
    return [torch.from_numpy(random.integers(-128, 128, shape, np.int8)) for _ in range(count)]
