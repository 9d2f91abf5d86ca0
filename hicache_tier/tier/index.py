"""Which pages the host tier holds, who needs them, and which goes first."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class State(Enum):
    """The life of an entry; it only moves forward."""

    FILLING = "filling"
    READY = "ready"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Entry:
    """One page of the host tier.

    Attributes
    ----------
    key, parent : bytes
        The page's key, and that of the page before it (None at the root).
    page : int
        Host page that holds it.
    state : State
        Only a ready entry has bytes that may be read.
    pins : int
        Reasons why the host page must not be reused: locks, copies, I/O queued or under way.
    stamp : int
        Time of last use on the index's own clock.
    hits : int
        Times the page was asked for, its insertion included.
    stored : bool
        Whether the store said that it has the page.
    queued : bool
        Whether a write of it waits or is under way.
    retiring : bool
        Whether it leaves the host tier when that write has ended.
    """

    key: bytes
    parent: bytes | None
    page: int
    state: State = State.FILLING
    pins: int = 0
    stamp: int = 0
    hits: int = 0
    stored: bool = False
    queued: bool = False
    retiring: bool = False


class HostIndex:
    """Entries by key, with LRU eviction that takes leaves before heads.

    An entry is removed from the index (`discard`) at any time; its host page is released when nothing pins
    it any more. `released` collects such pages for whoever frees them. The tier's lock guards it all.
    """

    def __init__(self) -> None:
        self.released: list[int] = []
        self.detached_pages = 0
        self.filling_pages = 0
        self.retiring_pages = 0
        self._entries: dict[bytes, Entry] = {}
        self._children: defaultdict[bytes, int] = defaultdict(int)
        self._heap: list[tuple[int, int, Entry]] = []
        self._pushes = 0
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry | None:
        """Return the entry of `key`, filling or ready."""
        return self._entries.get(key)

    def ready_prefix(self, keys: Sequence[bytes]) -> list[Entry]:
        """Return the entries of the leading keys that are ready."""
        out = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or entry.state is not State.READY:
                break
            out.append(entry)
        return out

    def add(self, key: bytes, parent: bytes | None, page: int) -> Entry:
        """Add a filling entry, pinned once for whoever fills it.

        A parent that comes after this page itself is left out: pages in a ring would wait for each other, and
        none of them could ever leave.
        """
        if key in self._children and self._comes_after(parent, key):
            parent = None
        entry = self._entries[key] = Entry(key, parent, page, pins=1)
        self.filling_pages += 1
        self._attach(entry)
        return entry

    def make_ready(self, entry: Entry) -> None:
        """Say that the page's bytes are complete."""
        entry.state = State.READY
        self.filling_pages -= 1
        self._offer(entry)

    def touch(self, chain: Sequence[Entry]) -> None:
        """Mark entries, in prefix order, as used now: heads later than tails, so that tails go first."""
        self._clock += len(chain)
        for distance, entry in enumerate(chain):
            entry.stamp = self._clock - distance
            self.stay(entry)
            self._offer(entry)

    def pin(self, entries: Iterable[Entry]) -> None:
        """Keep the pages of entries from being reused."""
        for entry in entries:
            entry.pins += 1

    def unpin(self, entries: Iterable[Entry]) -> None:
        """Undo one `pin`; pages of discarded entries are released with their last pin."""
        for entry in entries:
            entry.pins -= 1
            if entry.pins == 0 and entry.state is State.GONE:
                self.detached_pages -= 1
                self.released.append(entry.page)
            else:
                self._offer(entry)

    def discard(self, entry: Entry) -> None:
        """Forget an entry; its page is released now, or with its last pin."""
        if entry.state is State.GONE:
            return
        self.filling_pages -= entry.state is State.FILLING
        entry.state = State.GONE
        del self._entries[entry.key]
        if entry.retiring:
            self.retiring_pages -= 1
        else:
            self._detach(entry)
        if entry.pins:
            self.detached_pages += 1
        else:
            self.released.append(entry.page)

    def retire(self, entry: Entry) -> None:
        """Have an entry leave when its write has ended; its parent is a leaf from now on."""
        entry.retiring = True
        self.retiring_pages += 1
        self._detach(entry)

    def stay(self, entry: Entry) -> None:
        """Undo `retire`: the entry is wanted again, or its write does not end."""
        if entry.retiring:
            entry.retiring = False
            self.retiring_pages -= 1
            self._attach(entry)

    def victim(self) -> Entry | None:
        """Return the least recently used entry that nothing pins and no other continues; or None."""
        while self._heap:
            stamp, _, entry = heapq.heappop(self._heap)
            if stamp == entry.stamp and self._evictable(entry):
                return entry
        return None

    def _comes_after(self, key: bytes | None, first: bytes) -> bool:
        """Whether a page is `first`, or goes on from it by what the entries say of their parents."""
        while key is not None and key != first:
            entry = self._entries.get(key)
            key = None if entry is None else entry.parent
        return key is not None

    def _evictable(self, entry: Entry) -> bool:
        return (
            entry.state is State.READY
            and entry.pins == 0
            and not entry.retiring
            and entry.key not in self._children
        )

    def _offer(self, entry: Entry) -> None:
        """Put an evictable entry on the heap; records of an older stamp are skipped when popped."""
        if not self._evictable(entry):
            return
        self._pushes += 1
        heapq.heappush(self._heap, (entry.stamp, self._pushes, entry))
        if len(self._heap) > 4 * len(self._entries) + 64:
            leaves = [e for e in self._entries.values() if self._evictable(e)]
            self._heap = [(e.stamp, i, e) for i, e in enumerate(leaves)]
            heapq.heapify(self._heap)

    def _attach(self, entry: Entry) -> None:
        if entry.parent is not None:
            self._children[entry.parent] += 1

    def _detach(self, entry: Entry) -> None:
        if entry.parent is None:
            return
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]
            parent = self._entries.get(entry.parent)
            if parent is not None:
                self._offer(parent)
