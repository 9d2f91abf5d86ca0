"""The two ways in which pages of a device pool move: through a ring, or fragment by fragment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import wait
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache_tier_kernels import CopyPlan
from hicache_tier_kernels.ring_copy import ring_copy

from .descriptors import good_runs
from .engine import DeviceMemory, PageBatch, moved
from .landing import ABANDONED
from .payload import Sums, summing
from .staging import HALVES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from .device_payload import DevicePages
    from .device_sums import Summer
    from .engine import ByteEngine
    from .lease import Lease
    from .payload import Places
    from .staging import Ring

LEAST_STEP_NBYTES = 8 << 20
"""Least bytes of one step where there are enough: more, and the device works beside the engine."""
STEP_NBYTES = 128 << 20
"""Bytes of a step of fragments."""
_GIVEN_UP = "not_tried: an earlier part of the batch timed out"


class Move(ABC):
    """Some pages on their way, in steps; two steps are under way at once, each with a turn of its own.

    Parameters
    ----------
    pages : DevicePages
    numbers : int64 [n]
        Of the pool's pages.
    ring : Ring
    places : Places
    sums : Sums or None
    write : bool
    lease : Lease, optional
        Held while pages are brought from the ring to the pool.
    """

    def __init__(
        self,
        pages: DevicePages,
        numbers: NDArray[np.int64],
        ring: Ring,
        places: Places,
        sums: Sums | None,
        *,
        write: bool,
        lease: Lease | None = None,
    ) -> None:
        self.pages, self.numbers, self.ring, self.places, self.sums = pages, numbers, ring, places, sums
        self.write = write
        self.lease = lease
        self._reasons = [""] * len(numbers)
        self._summers: list[Summer | None] = [None] * HALVES

    @property
    @abstractmethod
    def step(self) -> int:
        """Pages of a step."""

    @property
    @abstractmethod
    def memory(self) -> DeviceMemory | None:
        """What the addresses of batches are in."""

    @abstractmethod
    def summed(self, start: int, stop: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return addresses `[n, F]` and lengths `[F]` of the very bytes of pages, as they move."""

    @abstractmethod
    def batch(self, start: int, stop: int) -> PageBatch:
        """Return what the engine is given for some pages."""

    @abstractmethod
    def fill(self, start: int, stop: int) -> None:
        """Bring pages to where the engine takes them from; enqueued on a device."""

    @abstractmethod
    def empty(self, start: int, stop: int) -> None:
        """Bring pages from where the engine put them; enqueued on a device."""

    def run(self, engine: ByteEngine) -> list[str]:
        """Move all pages; "" or a reason for each."""
        edges = [*range(0, len(self.numbers), self.step), len(self.numbers)]
        steps = list(pairwise(edges))
        if self.sums is not None and self.memory is not None:
            lengths = self.summed(0, 0)[1]
            shape = len(lengths), int(lengths[0]), self.step
            self._summers = [self.ring.summer(half, *shape) for half in range(min(len(steps), HALVES))]
        if len(steps) == 1:
            self._begin(0, *steps[0])
            self._finish(engine, 0, *steps[0], self.ring.mark())
        else:
            self._overlap(engine, steps)
        return self._reasons

    def _overlap(self, engine: ByteEngine, steps: Sequence[tuple[int, int]]) -> None:
        """Have a step under way for each half: the engine is never idle while a half is filled or emptied."""
        tasks: deque[Future[None]] = deque()
        try:
            for turn, (start, stop) in enumerate(steps):
                if len(tasks) == HALVES:
                    tasks[0].result()
                    tasks.popleft()
                self._begin(turn, start, stop)
                mark = self.ring.mark()
                tasks.append(self.ring.start(self._finish, engine, turn, start, stop, mark))
        finally:
            _wait_for(tasks)  # nobody touches the ring or the slots any more
        for task in tasks:
            task.result()

    def _begin(self, turn: int, start: int, stop: int) -> None:
        """Enqueue what comes before the engine's part of a step."""
        if self.write:
            self.fill(start, stop)
            self._sum(turn, start, stop)

    def _finish(
        self, engine: ByteEngine, turn: int, start: int, stop: int, begun: torch.cuda.Event | None
    ) -> None:
        """Do the engine's part of a step, and what comes after it."""
        self.ring.wait(begun)
        if self.write:
            self._take_sums(turn, start, stop)
            self._move(engine, start, stop)
            return
        self._move(engine, start, stop)
        self._sum(turn, start, stop)
        self._land(start, stop)
        self._take_sums(turn, start, stop)

    def _land(self, start: int, stop: int) -> None:
        """Bring pages that were read to the pool, if its owner still lets us; wait until they are there."""
        lease = self.lease
        if lease is not None and not lease.enter():
            self._reasons[start:stop] = [why or ABANDONED for why in self._reasons[start:stop]]
            return
        try:
            for first, last in good_runs(self._reasons, start, stop):
                self.empty(first, last)
            self.ring.wait(self.ring.mark())
        finally:
            if lease is not None:
                lease.leave()

    def _move(self, engine: ByteEngine, start: int, stop: int) -> None:
        """Let the engine move some pages."""
        if self.lease is not None and self.lease.ended:
            self._reasons[start:stop] = [ABANDONED] * (stop - start)
            return
        if not self.ring.usable:
            self._reasons[start:stop] = [_GIVEN_UP] * (stop - start)
            return
        batch = self.batch(start, stop)
        part = self._part(start, stop)
        if part is not None and batch.memory is None:
            addresses, lengths = self.summed(start, stop)
            batch.hook = summing(addresses, lengths, part)
        reasons = moved(engine, batch, write=self.write)
        self._reasons[start:stop] = reasons
        if any(reason.startswith("timeout") for reason in reasons):
            self.ring.usable = False  # bytes may still be under way in it

    # -- checksums ---------------------------------------------------------------------------------------

    def _part(self, start: int, stop: int) -> Sums | None:
        """Return the checksums asked for of some pages, if any."""
        sums = self.sums
        if sums is None or not any(sums.wanted[start:stop]):
            return None
        return Sums(sums.seeds[start:stop], sums.wanted[start:stop], sums.values[start:stop])

    def _sum(self, turn: int, start: int, stop: int) -> None:
        """Begin with the checksums of pages on a device; those in host memory are the engine's hook's."""
        part, found = self._part(start, stop), self._summers[turn % HALVES]
        if part is not None and found is not None:
            found.submit(self.summed(start, stop)[0], np.array(part.seeds, np.uint64))

    def _take_sums(self, turn: int, start: int, stop: int) -> None:
        part, found = self._part(start, stop), self._summers[turn % HALVES]
        if part is not None and found is not None:
            part.values[:] = found.take()


def _wait_for(tasks: Collection[Future[None]]) -> None:
    """Wait until all tasks have ended (each of their waits has a deadline), however often interrupted."""
    interrupted: BaseException | None = None
    while True:
        try:
            wait(tasks)
            break
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupted = error
    if interrupted is not None:
        raise interrupted


class RingMove(Move):
    """Pages gathered in a ring, moved as whole slots."""

    def __init__(
        self,
        pages: DevicePages,
        numbers: NDArray[np.int64],
        ring: Ring,
        places: Places,
        sums: Sums | None,
        *,
        write: bool,
        lease: Lease | None = None,
    ) -> None:
        super().__init__(pages, numbers, ring, places, sums, write=write, lease=lease)
        self._pitch = places.shape.stride
        self._a_half = ring.slots_a_half(self._pitch)
        least = -(-LEAST_STEP_NBYTES // self._pitch)
        self._step = max(1, min(self._a_half, max(least, -(-len(numbers) // HALVES))))
        position = np.arange(len(numbers))
        self._slots = position // self._step % HALVES * self._a_half + position % self._step
        slots = ring.map(pages.geometry, pages.layout, self._pitch)
        ours, theirs = torch.from_numpy(numbers), torch.from_numpy(self._slots)
        sides = (pages.rows, slots, ours, theirs) if write else (slots, pages.rows, theirs, ours)
        self._copy = ring_copy(CopyPlan(*sides, check_indices=False), slots, ring.stream)

    @property
    def step(self) -> int:
        """Pages of a step: a half's, or fewer where there are few."""
        return self._step

    @property
    def memory(self) -> DeviceMemory | None:
        """The ring's."""
        return self.ring.memory

    def summed(self, start: int, stop: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the pages as they lie in the ring."""
        return self._addresses(start, stop), np.array([self.places.shape.page_nbytes], np.uint64)

    def batch(self, start: int, stop: int) -> PageBatch:
        """Return the slots, with what lies between page and slot."""
        pitch = self._pitch
        return PageBatch(
            self.places.files[start:stop],
            self.places.offsets[start:stop],
            self._addresses(start, stop),
            np.array([pitch], np.uint64),
            pitch,
            pitch,
            memory=self.memory,
        )

    def fill(self, start: int, stop: int) -> None:
        """Gather pages in the ring."""
        first = int(self._slots[start])
        self.ring.blank_gaps(first, stop - start, self._pitch, self.places.shape.page_nbytes)
        self._copy.submit(start, stop - start)

    def empty(self, start: int, stop: int) -> None:
        """Scatter pages from the ring."""
        self._copy.submit(start, stop - start)

    def _addresses(self, start: int, stop: int) -> NDArray[np.uint64]:
        found: NDArray[np.uint64] = (self.ring.address + self._slots[start:stop] * self._pitch).view(
            np.uint64
        )
        return np.asarray(found[:, None])


class FragmentMove(Move):
    """Pages as they lie in the pool, fragment by fragment."""

    @property
    def step(self) -> int:
        """Pages of a step: enough to keep an engine busy while checksums of the next are computed."""
        return max(1, STEP_NBYTES // self.places.shape.page_nbytes)

    @property
    def memory(self) -> DeviceMemory | None:
        """The pool's."""
        rows = self.pages.rows
        if rows.device.type != "cuda":
            return None
        return DeviceMemory(rows.device.index or 0, self.pages.regions, rows)

    def summed(self, start: int, stop: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return the fragments."""
        fragments = self.pages.fragments
        if fragments is None:
            raise ValueError("the pool's pages do not move one by one")
        lengths = np.full(len(fragments.first), fragments.nbytes, np.uint64)
        return fragments.addresses(self.numbers[start:stop]), lengths

    def batch(self, start: int, stop: int) -> PageBatch:
        """Return the fragments as segments of pages."""
        addresses, lengths = self.summed(start, stop)
        shape = self.places.shape
        return PageBatch(
            self.places.files[start:stop],
            self.places.offsets[start:stop],
            addresses,
            lengths,
            shape.page_nbytes,
            shape.stride,
            memory=self.memory,
        )

    def fill(self, start: int, stop: int) -> None:
        """Nothing to do: the engine takes them from the pool."""

    def empty(self, start: int, stop: int) -> None:
        """Nothing to do: the engine put them there."""
