"""The two halves of the round trip: pages go down to the store, and come back up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hicache_tier.device_pool import DevicePool
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.host_pool import HostPool
from hicache_tier.keys import page_keys
from hicache_tier.transfer import backup, load
from hicache_tier_storage import open_store

from .bridge import fill_cache, fill_pool, geometry_of
from .stopwatch import Stopwatch

if TYPE_CHECKING:
    from transformers import DynamicCache

    from hicache_tier.geometry import KVGeometry

    from .job import Job

_SEED = 7
_SMALLEST_CAPACITY = 64 << 20


class Shelf:
    """The pools and the store of one process: what an engine sets up once, when it starts.

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

    @property
    def description(self) -> dict[str, Any]:
        """What one page holds."""
        return {"geometry": self.geometry.as_dict(), "page_nbytes": self.geometry.page_nbytes}

    def keep(self, cache: DynamicCache, prompt: list[int]) -> dict[str, Any]:
        """Move all full pages of the prompt from the model's cache down to the store."""
        keys = page_keys(prompt, self.options.page_tokens)
        fill_pool(cache, self.device, self.places)
        pages = self._host_pages(len(keys))
        with self.watch.time("backup_seconds"):
            _finish(backup(self.device, self.host, self.places, pages, self.options.io_backend))
        with self.watch.time("put_seconds"):
            stored = sum(bool(ok) for ok in self.store.put(keys, self.host, pages))
        self.host.free(pages)
        return {"pages_full": len(keys), "pages": stored, "bytes": stored * self.geometry.page_nbytes}

    def fetch(self, cache: DynamicCache, prompt: list[int]) -> dict[str, Any]:
        """Bring the longest stored prefix up into the model's empty cache.

        The last token of the prompt is always left to the model, which needs one to say what comes next.
        """
        with self.watch.time("match_seconds"):
            keys = page_keys(prompt[:-1], self.options.page_tokens)
            matched = self.store.match_prefix(keys)
        loaded = self._load(keys[:matched], cache) if matched else 0
        nbytes = loaded * self.geometry.page_nbytes
        return {"pages_matched": matched, "pages_loaded": loaded, "bytes_loaded": nbytes}

    def _load(self, keys: list[bytes], cache: DynamicCache) -> int:
        """Return how many pages, from the first on, could be loaded."""
        pages = self._host_pages(len(keys))
        with self.watch.time("get_seconds"):
            verdicts = [bool(ok) for ok in self.store.get(keys, self.host, pages)]
        good = verdicts.index(False) if False in verdicts else len(verdicts)
        places = self.places.flip(0)[:good]  # other places than those that the first process used
        if good:
            with self.watch.time("load_seconds"):
                _finish(load(self.host, self.device, pages[:good], places, self.options.io_backend))
            with self.watch.time("rebuild_seconds"):
                fill_cache(self.device, places, cache)
        self.host.free(pages)
        return good

    def _host_pages(self, count: int) -> torch.Tensor:
        pages = self.host.alloc(count)
        assert pages is not None  # noqa: S101 - the pool was made for all pages of the prompt
        return pages

    def close(self) -> None:
        """Close the store, then the pools."""
        with self.watch.time("close_seconds"):
            self.store.close()
            self.host.close()


def _finish(completion: Any) -> None:  # noqa: ANN401 - None on a CPU, a completion on a GPU
    if completion is not None:
        completion.wait()
