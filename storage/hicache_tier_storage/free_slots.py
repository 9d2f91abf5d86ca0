"""Slots that hold no page."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

_MANY = 16  # slots that come at once are sorted in where they are more than a 16th of those that are there


class FreeSlots:
    """Slots to be had, lowest first, and slots that wait until nobody reads or writes them any more.

    Most lie in one sorted list, so that a batch is one slice of it; few that come back wait in a heap.

    Parameters
    ----------
    slots_a_slab : int

    Attributes
    ----------
    waiting : set of int
    """

    def __init__(self, slots_a_slab: int) -> None:
        self._size = slots_a_slab
        self._sorted: list[int] = []  # the lowest last
        self._heap: list[int] = []
        self.waiting: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._heap)

    def __iter__(self) -> Iterator[int]:
        yield from self._sorted
        yield from self._heap

    def add(self, slots: Sequence[int]) -> None:
        """Add slots."""
        if len(slots) * _MANY > len(self):
            self._sorted += [*self._heap, *slots]
            self._sorted.sort(reverse=True)
            self._heap.clear()
            return
        for slot in slots:
            heapq.heappush(self._heap, slot)

    def take(self, count: int) -> list[int]:
        """Take up to `count` slots."""
        ordered, heap = self._sorted, self._heap
        taken: list[int] = []
        while heap and len(taken) < count:
            taken.append(ordered.pop() if ordered and ordered[-1] < heap[0] else heapq.heappop(heap))
        first = max(0, len(ordered) - (count - len(taken)))
        taken += ordered[first:][::-1]
        del ordered[first:]
        return taken

    def take_outside(self, slab: int) -> int | None:
        """Take one slot that is not in a slab."""
        kept: list[int] = []
        target = None
        while target is None and (found := self.take(1)):
            if found[0] // self._size == slab:
                kept += found
            else:
                target = found[0]
        self.add(kept)
        return target

    def count_outside(self, slab: int) -> int:
        """Count the slots that are not in a slab."""
        return sum(slot // self._size != slab for slot in self)

    def give_back(self, slots: NDArray[np.int64], pins: NDArray[np.int32]) -> None:
        """Add slots; those with pins wait."""
        busy = pins[slots] != 0
        self.waiting.update(slots[busy].tolist())
        self.add(slots[~busy].tolist())

    def release(self, slots: NDArray[np.int64], pins: NDArray[np.int32]) -> None:
        """Add those of these slots that waited and have no pins any more."""
        if self.waiting:
            done = [slot for slot in {*slots.tolist()} & self.waiting if not pins[slot]]
            self.waiting.difference_update(done)
            self.add(done)

    def drop(self, slots: range) -> None:
        """Forget the slots of a slab."""
        self._sorted = [slot for slot in self if slot not in slots]
        self._sorted.sort(reverse=True)
        self._heap.clear()
        self.waiting = {slot for slot in self.waiting if slot not in slots}
