"""Which page goes first: least recently used, leaves before heads.

A page that another stored page continues (a head) is kept until its last child is gone, so that what remains
of a chain is always a prefix. Cost is logarithmic in the number of pages, whatever is stored: what comes up
and must stay is set aside until something changes for it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class LeafLru:
    """Recency of the pages of one partition.

    A touch stores a tick and nothing else; the heap holds `tick << 32 | slot` once a page and is corrected as
    entries come up, so that touching a batch costs one vectorised store.
    """

    def __init__(self, capacity: int) -> None:
        self.ticks: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self._held: NDArray[np.bool_] = np.zeros(capacity, np.bool_)
        self._heads: NDArray[np.uint64] = np.zeros(capacity, np.uint64)  # first 8 bytes of each page's key
        self._parents: NDArray[np.uint64] = np.zeros(capacity, np.uint64)
        self._clock = 1
        self._count = 0
        self._heap: list[int] = []
        self._children: dict[int, int] = {}  # key head -> children stored
        self._parked: dict[int, set[int]] = {}  # key head -> slots that wait for its children to go
        self._parked_count = 0
        self._parked_heap: list[int] = []  # the same slots, for when nothing but heads is left
        self._aside: set[int] = set()  # pinned slots that came up; they wait for `recall`

    def __len__(self) -> int:
        return self._count

    def resize(self, capacity: int) -> None:
        """Grow to `capacity` slots."""
        extra = capacity - len(self.ticks)
        if extra > 0:
            self.ticks = np.concatenate([self.ticks, np.zeros(extra, np.int64)])
            self._held = np.concatenate([self._held, np.zeros(extra, np.bool_)])
            self._heads = np.concatenate([self._heads, np.zeros(extra, np.uint64)])
            self._parents = np.concatenate([self._parents, np.zeros(extra, np.uint64)])

    def touch(self, slots: NDArray[np.int64]) -> None:
        """Make a chain recent: the first page most, the last least."""
        self._clock += len(slots)
        self.ticks[slots] = self._clock - np.arange(len(slots))

    def add(self, slots: NDArray[np.int64], heads: NDArray[np.uint64], parents: NDArray[np.uint64]) -> None:
        """Enter stored pages of one chain: first 8 bytes of their keys and of their parents', 0 for none."""
        self.touch(slots)
        self._enter(slots, heads, parents)
        # All that the heap holds is older, so that ascending ticks behind it keep it one.
        self._heap += (self.ticks[slots] << _SLOT_BITS | slots)[::-1].tolist()

    def restore(
        self, slots: NDArray[np.int64], heads: NDArray[np.uint64], parents: NDArray[np.uint64]
    ) -> None:
        """Enter the pages of an opened partition, least recent first."""
        self.ticks[slots] = self._clock + np.arange(len(slots))
        self._clock += len(slots)
        self._enter(slots, heads, parents)
        self._heap = (self.ticks[slots] << _SLOT_BITS | slots).tolist()  # ascending ticks are a heap

    def _enter(
        self, slots: NDArray[np.int64], heads: NDArray[np.uint64], parents: NDArray[np.uint64]
    ) -> None:
        self._held[slots] = True
        self._heads[slots] = heads
        self._parents[slots] = parents
        self._count += len(slots)
        children = self._children
        for parent in parents[parents != 0].tolist():
            children[parent] = children.get(parent, 0) + 1

    def move(self, slot: int, target: int) -> None:
        """Carry a page's place over to the slot that it was moved to."""
        for column in (self.ticks, self._heads, self._parents):
            column[target] = column[slot]
        self._forget_parked(slot)
        self._held[slot], self._held[target] = False, True
        heapq.heappush(self._heap, self._entry(target))

    def remove(self, slots: Iterable[int]) -> None:
        """Forget pages that are gone; their parents may become leaves."""
        for slot in slots:
            if not self._held[slot]:
                continue
            self._forget_parked(slot)
            self._held[slot] = False
            self._count -= 1
            parent = int(self._parents[slot])
            left = self._children.get(parent, 0) - 1
            if left > 0:
                self._children[parent] = left
            elif parent:
                self._children.pop(parent, None)
                self._unpark(parent)

    def recall(self, slots: Iterable[int]) -> None:
        """Have pages take part again that are not pinned any more."""
        if self._aside:
            for slot in self._aside.intersection(slots):
                self._aside.discard(slot)
                heapq.heappush(self._heap, self._entry(slot))

    def pop(
        self, count: int, spared: Callable[[int], bool], pinned: NDArray[np.bool_] | None = None
    ) -> list[int]:
        """Take up to `count` pages to evict, forgetting them.

        Parameters
        ----------
        count : int
        spared : callable
            Tells whether a slot's page must stay for now (in flight); it is asked again each time.
        pinned : bool, one a slot, optional
            Pages that must stay until `recall` says otherwise.
        """
        if len(self._heap) > 2 * self._count + 1024:
            self._compact()
        victims: list[int] = []
        kept: list[int] = []
        kept_heads: list[int] = []
        while len(victims) < count:
            slot = self._next_leaf(spared, pinned, kept)
            if slot is None:
                # Only heads are left: chains longer than the capacity, or keys that share 8 leading bytes.
                slot = self._next_head(spared, pinned, kept_heads)
            if slot is None:
                break
            victims.append(slot)
            self.remove((slot,))
        for entry in kept:
            heapq.heappush(self._heap, entry)
        for entry in kept_heads:
            heapq.heappush(self._parked_heap, entry)
        return victims

    def _next_leaf(
        self, spared: Callable[[int], bool], pinned: NDArray[np.bool_] | None, kept: list[int]
    ) -> int | None:
        """Return the least recent page that no other continues; heads that come up are parked."""
        heap = self._heap
        while heap:
            entry = heapq.heappop(heap)
            slot = entry & _SLOT_MASK
            if not self._held[slot]:
                continue  # gone since
            current = self._entry(slot)
            if current != entry:
                heapq.heappush(heap, current)  # touched since
            elif pinned is not None and pinned[slot]:
                self._aside.add(slot)
            elif self._children and self._children.get(int(self._heads[slot])):
                self._park(entry, slot)
            elif spared(slot):
                kept.append(entry)
            else:
                return slot
        return None

    def _next_head(
        self, spared: Callable[[int], bool], pinned: NDArray[np.bool_] | None, kept: list[int]
    ) -> int | None:
        """Return the least recent parked page; it stays parked until it is removed."""
        heap = self._parked_heap
        while heap:
            entry = heapq.heappop(heap)
            slot = entry & _SLOT_MASK
            if not self._held[slot] or slot not in self._parked.get(int(self._heads[slot]), ()):
                continue  # gone, or a leaf by now
            current = self._entry(slot)
            if current != entry:
                heapq.heappush(heap, current)
            elif pinned is not None and pinned[slot]:
                self._forget_parked(slot)
                self._aside.add(slot)
            elif spared(slot):
                kept.append(entry)
            else:
                return slot
        return None

    def _park(self, entry: int, slot: int) -> None:
        waiting = self._parked.setdefault(int(self._heads[slot]), set())
        if slot in waiting:
            return  # an entry that the slot's earlier page left behind
        waiting.add(slot)
        self._parked_count += 1
        heapq.heappush(self._parked_heap, entry)
        if len(self._parked_heap) > 2 * self._parked_count + 1024:
            self._parked_heap = [self._entry(other) for slots in self._parked.values() for other in slots]
            heapq.heapify(self._parked_heap)

    def _entry(self, slot: int) -> int:
        return int(self.ticks[slot]) << _SLOT_BITS | slot

    def _unpark(self, head: int) -> None:
        waiting = self._parked.pop(head, ())
        self._parked_count -= len(waiting)
        for slot in waiting:
            if self._held[slot]:
                heapq.heappush(self._heap, self._entry(slot))

    def _forget_parked(self, slot: int) -> None:
        """Drop a page that waits for something: its slot will soon hold another page."""
        self._aside.discard(slot)
        head = int(self._heads[slot])
        waiting = self._parked.get(head) if self._parked else None
        if waiting and slot in waiting:
            waiting.discard(slot)
            self._parked_count -= 1
            if not waiting:
                del self._parked[head]

    def _compact(self) -> None:
        """Rebuild a heap that pages removed otherwise have left full of dead entries."""
        parked = [slot for slots in self._parked.values() for slot in slots]
        live = self._held.copy()
        live[parked] = False
        live[list(self._aside)] = False
        slots: Sequence[int] = np.flatnonzero(live).tolist()
        self._heap = [self._entry(slot) for slot in slots]
        heapq.heapify(self._heap)
