"""Filling the host tier from an archive, when a server starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hicache_tier.errors import InvalidArgumentError
from hicache_tier_storage.archive import open_archive
from hicache_tier_storage.archive.loading import PageFeed, target_of
from hicache_tier_storage.identity import Identity

from .index import State

if TYPE_CHECKING:
    from hicache_tier_storage.archive import Archive

    from .core import Core
    from .index import Entry
    from .writer import Writer


class Warming:
    """Brings pages of archives into the host tier; runs in the caller's thread."""

    def __init__(self, core: Core, writer: Writer) -> None:
        self._core = core
        self._writer = writer

    def warm(self, source: str | Path | Archive, *, kv_heads: int | None, allow_lossy: bool) -> int:
        """See `Tier.warm`."""
        core = self._core
        identity = getattr(core.store, "identity", None)
        if not isinstance(identity, Identity):
            raise InvalidArgumentError(
                "the tier's store does not tell its identity; pages of an archive need it."
            )
        archive = open_archive(source) if isinstance(source, str | Path) else source
        try:
            target = target_of(archive, core.host, identity, kv_heads=kv_heads, allow_lossy=allow_lossy)
            tenants = () if identity.tenant is None else (identity.tenant,)
            return self._fill(PageFeed(target, tenants, core.host.free_pages))
        finally:
            if archive is not source:
                archive.close()

    def _fill(self, feed: PageFeed) -> int:
        """Take free host pages for what is not there yet, fill them, and enter those that are whole."""
        core = self._core
        with core.section():
            places = [at for at, key in enumerate(feed.keys) if core.index.get(key) is None]
            pages = core.take_free(len(places))
            entries = {
                at: core.index.add(feed.keys[at], feed.parents[at], page)
                for at, page in zip(places, pages, strict=False)
            }
        reasons: dict[int, str] = {}
        try:
            with core.host.in_use():
                reasons = feed.read_into(core.host, {at: entry.page for at, entry in entries.items()})
        finally:
            with core.held():
                ready = self._enter(entries, reasons)
                self._writer.hit(ready)
        return len(ready)

    def _enter(self, entries: dict[int, Entry], reasons: dict[int, str]) -> list[Entry]:
        """Make whole pages ready, the best to go last; give the others back."""
        core, ready = self._core, []
        for at, entry in entries.items():
            why = reasons.get(at, "call_failed")
            if not why and entry.state is State.FILLING:
                core.index.make_ready(entry)
                entry.hits += 1
                ready.append(entry)
            else:
                reason = why.partition(":")[0] or "not_wanted_any_more"
                core.counters.add(f"warming.refused_pages.{reason}")
                core.index.discard(entry)
        core.counters.add("warming.loaded_pages", len(ready))
        core.index.touch(ready)
        core.index.unpin(entries.values())
        return ready
