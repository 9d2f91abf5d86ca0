"""Which page goes first: least recently used, leaves before heads.

A page that another stored page continues (a head) is kept until its last child is gone, so that what remains
of a chain is always a prefix. Cost is logarithmic in the number of pages, whatever is stored.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray


class LeafLru:
    """Recency of the pages of one partition.

    A touch stores a tick and nothing else; the heap holds one entry a page and is corrected as entries come
    up, so that touching a batch costs one vectorised store.
    """

    def __init__(self, capacity: int) -> None:
        self.ticks: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self._clock = 1
        self._heap: list[tuple[int, int]] = []
        self._keys: dict[int, tuple[int, int]] = {}  # slot -> (own key's head, parent's)
        self._children: dict[int, int] = {}  # key head -> children stored
        self._parked: dict[int, list[int]] = {}  # key head -> slots that wait for its children to go

    def resize(self, capacity: int) -> None:
        """Grow to `capacity` slots."""
        if capacity > len(self.ticks):
            self.ticks = np.concatenate([self.ticks, np.zeros(capacity - len(self.ticks), np.int64)])

    def touch(self, slots: NDArray[np.int64]) -> None:
        """Make a chain recent: the first page most, the last least."""
        self._clock += len(slots)
        self.ticks[slots] = self._clock - np.arange(len(slots))

    def add(self, slots: NDArray[np.int64], heads: Sequence[int], parents: Sequence[int]) -> None:
        """Enter stored pages: the first 8 bytes of their keys and of their parents' keys, 0 for none."""
        self.touch(slots)
        ticks, numbers = self.ticks[slots].tolist(), slots.tolist()
        self._keys.update(zip(numbers, zip(heads, parents, strict=True), strict=True))
        children, heap, push = self._children, self._heap, heapq.heappush
        for slot, parent, tick in zip(numbers, parents, ticks, strict=True):
            if parent:
                children[parent] = children.get(parent, 0) + 1
            push(heap, (tick, slot))

    def restore(self, slots: Sequence[int], heads: Sequence[int], parents: Sequence[int]) -> None:
        """Enter the pages of an opened partition, least recent first."""
        ticks = range(self._clock, self._clock + len(slots))
        self._clock += len(slots)
        self.ticks[np.asarray(slots, np.int64)] = np.asarray(ticks, np.int64)
        self._keys.update(zip(slots, zip(heads, parents, strict=True), strict=True))
        for parent in parents:
            if parent:
                self._children[parent] = self._children.get(parent, 0) + 1
        self._heap = list(zip(ticks, slots, strict=True))  # ascending ticks are a heap

    def move(self, slot: int, target: int) -> None:
        """Carry a page's place over to the slot that it was moved to."""
        self._keys[target] = self._keys.pop(slot)
        self.ticks[target] = self.ticks[slot]
        heapq.heappush(self._heap, (int(self.ticks[target]), target))

    def remove(self, slots: Iterable[int]) -> None:
        """Forget pages that are gone; their parents may become leaves."""
        for slot in slots:
            entry = self._keys.pop(slot, None)
            if entry is None:
                continue
            parent = entry[1]
            left = self._children.get(parent, 0) - 1
            if left > 0:
                self._children[parent] = left
            elif parent:
                self._children.pop(parent, None)
                self._unpark(parent)

    def _unpark(self, head: int) -> None:
        for slot in self._parked.pop(head, ()):
            heapq.heappush(self._heap, (int(self.ticks[slot]), slot))

    def pop(self, count: int, spared: Callable[[int], bool]) -> list[int]:
        """Take up to `count` pages to evict, forgetting them.

        Parameters
        ----------
        spared : callable
            Tells whether a slot's page must stay (pinned, or in flight).
        """
        if len(self._heap) > 2 * len(self._keys) + 1024:
            self._compact()
        victims = self._pop(count, spared, heads=False)
        if len(victims) < count and self._parked:
            # Only heads are left: chains longer than the capacity, or keys that share their first 8 bytes.
            for head in list(self._parked):
                self._unpark(head)
            victims += self._pop(count - len(victims), spared, heads=True)
        return victims

    def _compact(self) -> None:
        parked = {slot for slots in self._parked.values() for slot in slots}
        self._heap = [(int(self.ticks[slot]), slot) for slot in self._keys if slot not in parked]
        heapq.heapify(self._heap)

    def _pop(self, count: int, spared: Callable[[int], bool], *, heads: bool) -> list[int]:
        victims: list[int] = []
        kept: list[tuple[int, int]] = []
        heap, keys, ticks = self._heap, self._keys, self.ticks
        while heap and len(victims) < count:
            tick, slot = heapq.heappop(heap)
            entry = keys.get(slot)
            if entry is None:
                continue  # gone since
            current = int(ticks[slot])
            if current != tick:
                heapq.heappush(heap, (current, slot))
            elif not heads and self._children.get(entry[0]):
                self._parked.setdefault(entry[0], []).append(slot)
            elif spared(slot):
                kept.append((tick, slot))
            else:
                victims.append(slot)
                self.remove((slot,))
        for item in kept:
            heapq.heappush(heap, item)
        return victims

    def __len__(self) -> int:
        return len(self._keys)
