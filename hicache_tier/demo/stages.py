"""The two halves of the round trip: pages go down to the store, and come back up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hicache_tier.device_pool import DevicePool
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.host_pool import HostPool
from hicache_tier.keys import page_keys
from hicache_tier.tier import Tier, WritePolicy
from hicache_tier.transfer import backup, load
from hicache_tier_storage import open_store

from .bridge import fill_cache, fill_pool, geometry_of
from .stopwatch import Stopwatch

if TYPE_CHECKING:
    from transformers import DynamicCache

    from hicache_tier.geometry import KVGeometry

    from .job import Job

_SEED = 7
_BATCH_PAGES = 32
_PATIENCE_S = 60.0  # a demo on a slow disk is slow; a server would not wait so long
_SMALLEST_CAPACITY = 64 << 20


class Shelf:
    """The pools, the store and the tier of one process: what an engine sets up once, when it starts.

    Attributes
    ----------
    watch : Stopwatch
        How long each stage took.
    """

    def __init__(self, job: Job, geometry: KVGeometry, num_pages: int, device: torch.device) -> None:
        options = job.options
        self.geometry = geometry
        self.options = options
        self.watch = Stopwatch()
        with self.watch.time("open_seconds"):
            self.device = DevicePool.empty(geometry, num_pages, device=device)
            self.host = HostPool(geometry, options.layout, num_pages)
            self.store = open_store(
                job.root,
                geometry,
                layout=options.layout,
                model=job.source.name,
                revision=job.source.revision,
                capacity_bytes=max(2 * num_pages * geometry.page_nbytes, _SMALLEST_CAPACITY),
                engine=options.engine,
            )
            self.tier = Tier(
                self.host,
                self.store,
                policy=options.policy,
                prefetch="wait_complete",
                batch_pages=_BATCH_PAGES,
                write_queue_pages=num_pages,
                lookup_timeout_s=_PATIENCE_S,
                deadline_s=_PATIENCE_S,
                io_backend=options.io_backend,
            )
            self._warm_up()
        # An engine's free pages lie anywhere, so the places in the device pool are shuffled here.
        self.places = torch.randperm(num_pages, generator=torch.Generator().manual_seed(_SEED))

    @classmethod
    def for_model(cls, job: Job, warmed: DynamicCache, prompt: list[int], device: torch.device) -> Shelf:
        """Set up for pages of the geometry that `warmed` shows, a cache which the model has filled."""
        size = job.options.page_tokens
        if len(prompt) <= size:
            raise InvalidArgumentError(
                f"the prompt has {len(prompt)} tokens; the demo needs more than one page of {size}. "
                "Give a longer prompt or a smaller page size."
            )
        return cls(job, geometry_of(warmed, size), len(prompt) // size, device)

    def _warm_up(self) -> None:
        """Move one page down and up, so that no timed copy pays for first calls (on a GPU, for compiling)."""
        pages = self.host.alloc(1)
        backup(self.device, self.host, [0], pages, self.options.io_backend).wait()
        load(self.host, self.device, pages, [0], self.options.io_backend).wait()
        self.host.free(pages)

    def usable_tokens(self, prompt: list[int]) -> int:
        """Tokens in whole pages, with one token of the prompt left over for the model."""
        size = self.geometry.page_tokens
        return (len(prompt) - 1) // size * size

    @property
    def description(self) -> dict[str, Any]:
        """What one page holds."""
        return {"geometry": self.geometry.as_dict(), "page_nbytes": self.geometry.page_nbytes}

    def keep(self, cache: DynamicCache, prompt: list[int]) -> dict[str, Any]:
        """Move all full pages of the prompt from the model's cache down to the store."""
        keys = page_keys(prompt, self.options.page_tokens)
        fill_pool(cache, self.device, self.places)
        with self.watch.time("backup_seconds"):
            held = self.tier.insert(keys, self.device, self.places)
        with self.watch.time("put_seconds"):
            if self.tier.settings.policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
                # The prompt comes again, as often as the policy wants to see a page before it is stored.
                for _ in range(self.tier.settings.hits_to_store - 1):
                    self.tier.insert(keys, self.device, self.places)
            self.tier.flush(_PATIENCE_S)
        stored = self.store.match_prefix(keys)
        nbytes = stored * self.geometry.page_nbytes
        return {"pages_full": len(keys), "pages_held": held, "pages": stored, "bytes": nbytes}

    def fetch(self, cache: DynamicCache, prompt: list[int]) -> dict[str, Any]:
        """Bring the longest stored prefix up into the model's empty cache.

        The last token of the prompt is always left to the model, which needs one to say what comes next.
        """
        with self.watch.time("match_seconds"):
            keys = page_keys(prompt[:-1], self.options.page_tokens)
            match = self.tier.match(keys)
        with self.watch.time("get_seconds"):
            self.tier.prefetch(keys[: match.pages]).wait()
        places = self.places.flip(0)[: len(keys)]  # other places than those that the first process used
        with self.watch.time("load_seconds"):
            loaded = self.tier.load(keys, self.device, places)
        with self.watch.time("rebuild_seconds"):
            if loaded:
                fill_cache(self.device, places[:loaded], cache)
        nbytes = loaded * self.geometry.page_nbytes
        return {"pages_matched": match.pages, "pages_loaded": loaded, "bytes_loaded": nbytes}

    def close(self) -> dict[str, Any]:
        """Close the tier, then the store, then the pool; return the tier's counters."""
        with self.watch.time("close_seconds"):
            stats = self.tier.stats()
            self.tier.close(_PATIENCE_S)
            self.store.close()
            self.host.close()
        return stats
