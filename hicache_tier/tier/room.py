"""Room in the host tier: which pages leave so that others can come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .policy import WritePolicy

if TYPE_CHECKING:
    from .core import Core
    from .index import Entry
    from .writer import Writer


class Room:
    """Finds host pages for what comes in, without ever waiting for the store."""

    def __init__(self, core: Core, writer: Writer) -> None:
        self._core = core
        self._writer = writer
        self._writes_back = core.settings.policy is WritePolicy.WRITE_BACK

    def take(self, wanted: int) -> list[int]:
        """Return up to `wanted` host pages, evicting what was used least recently.

        Pages whose write is queued go last, their writes dropped; with `write_back` they stay, and fewer
        pages are returned.
        """
        core = self._core
        core.settle()
        self._evict(wanted - core.host.free_pages)
        core.settle()
        short = wanted - core.host.free_pages
        while short > 0 and not self._writes_back and self._writer.drop_for_room(short):
            self._evict(short)
            core.settle()
            short = wanted - core.host.free_pages
        return core.take_free(wanted)

    def keep_reserve(self) -> None:
        """With `write_back`, start writing back what has to leave next, so that room is there in time."""
        if self._writes_back:
            self._core.settle()
            self._evict(self._core.settings.write_back_reserve_pages - self._core.host.free_pages)

    def _evict(self, wanted: int) -> None:
        """Evict until `wanted` more pages are released, or will be when their write has ended."""
        core = self._core
        leaving = core.index.retiring_pages
        dirty: list[Entry] = []
        while len(core.index.released) + leaving + len(dirty) < wanted:
            entry = core.index.victim()
            if entry is None:
                break
            if self._writes_back and not entry.stored:
                core.index.retire(entry)
                dirty.append(entry)
                continue
            core.counters.add("evictions.pages.stored" if entry.stored else "evictions.pages.unsaved")
            core.index.discard(entry)
        self._writer.offer(dirty[::-1])  # heads before tails
