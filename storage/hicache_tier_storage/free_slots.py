"""Slots that hold no page."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    from numpy.typing import NDArray


class FreeSlots:
    """Slots to be had, lowest first, and slots that wait until nobody reads or writes them any more.

    Parameters
    ----------
    slots_a_slab : int

    Attributes
    ----------
    waiting : set of int
    """

    def __init__(self, slots_a_slab: int) -> None:
        self._size = slots_a_slab
        self._heap: list[int] = []
        self.waiting: set[int] = set()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[int]:
        return iter(self._heap)

    def load(self, slots: list[int]) -> None:
        """Add many slots at once."""
        self._heap += slots
        heapq.heapify(self._heap)

    def add(self, slots: Iterable[int]) -> None:
        """Add slots."""
        for slot in slots:
            heapq.heappush(self._heap, slot)

    def take(self, count: int) -> list[int]:
        """Take up to `count` slots."""
        return [heapq.heappop(self._heap) for _ in range(min(count, len(self._heap)))]

    def take_outside(self, slab: int) -> int | None:
        """Take one slot that is not in a slab."""
        kept: list[int] = []
        target = None
        while self._heap and target is None:
            slot = heapq.heappop(self._heap)
            if slot // self._size == slab:
                kept.append(slot)
            else:
                target = slot
        self.add(kept)
        return target

    def count_outside(self, slab: int) -> int:
        """Count the slots that are not in a slab."""
        return sum(slot // self._size != slab for slot in self._heap)

    def give_back(self, slots: list[int], pins: NDArray[np.int32]) -> None:
        """Add slots; those with pins wait."""
        for slot in slots:
            if pins[slot]:
                self.waiting.add(slot)
            else:
                heapq.heappush(self._heap, slot)

    def release(self, slots: NDArray[np.int64], pins: NDArray[np.int32]) -> None:
        """Add those of these slots that waited and have no pins any more."""
        if self.waiting:
            for slot in {*slots.tolist()} & self.waiting:
                if not pins[slot]:
                    self.waiting.discard(slot)
                    heapq.heappush(self._heap, slot)

    def drop(self, slots: range) -> None:
        """Forget the slots of a slab."""
        self._heap = [slot for slot in self._heap if slot not in slots]
        heapq.heapify(self._heap)
        self.waiting = {slot for slot in self.waiting if slot not in slots}
