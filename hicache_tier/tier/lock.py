"""Pages that a request uses and that must stay in the host tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from .core import Core
    from .index import Entry


class PageLock:
    """Keeps pages in the host tier until `release`; made by `Tier.lock`, and a context manager.

    Several locks may hold one page; it can be evicted after the last was released.

    Attributes
    ----------
    pages : int
        Leading pages that were there and are held.
    """

    def __init__(self, core: Core, entries: list[Entry]) -> None:
        self.pages = len(entries)
        self._core = core
        self._entries = entries
        core.index.pin(entries)
        core.locks.add(self)

    def __repr__(self) -> str:
        state = "held" if self in self._core.locks else "released"
        return f"PageLock({self.pages} pages, {state})"

    def release(self) -> None:
        """Let the pages be evicted again; a second call does nothing."""
        if self._core.forked:
            return
        with self._core.held():
            self.drop()

    def drop(self) -> None:
        """`release` for those who have the tier's lock."""
        if self in self._core.locks:
            self._core.locks.remove(self)
            self._core.index.unpin(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
