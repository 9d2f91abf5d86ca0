"""The two ways in which pages of a device pool move: through a ring, or fragment by fragment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache_tier_kernels import CopyPlan
from hicache_tier_kernels.ring_copy import ring_copy

from .descriptors import good_runs
from .engine import DeviceMemory, PageBatch, as_starting, moved, started
from .flights import Settled
from .landing import ABANDONED
from .payload import Sums, summing
from .staging import HALVES

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .device_payload import DevicePages
    from .device_sums import Summer
    from .engine import ByteEngine
    from .flights import Flight
    from .lease import Lease
    from .payload import Places
    from .staging import Ring

LEAST_STEP_NBYTES = 8 << 20
"""Least bytes of one step where there are enough: what a step costs beside its I/O is little then."""
STEP_NBYTES = 128 << 20
"""Bytes of a step of fragments, by an engine that blocks."""
_GIVEN_UP = "not_tried: an earlier part of the batch timed out"


class Move(ABC):
    """Some pages on their way, in steps, several of them under way at once.

    An engine that can start a step and return has as many under way as there is room for, so that its queue
    never runs dry while the device fills or empties a few; one that blocks has two, on two threads.

    Parameters
    ----------
    engine : ByteEngine
    pages : DevicePages
    numbers : int64 [n]
        Of the pool's pages.
    ring : Ring
    places : Places
    sums : Sums or None
    write : bool
    lease : Lease, optional
        Held while pages are brought from the ring to the pool.

    Attributes
    ----------
    starting : StartingEngine or None
        The engine, where it can have many steps under way.
    left : bool
        Whether bytes may still be under way.
    step, window : int
        Pages of a step, and pages from the first that is under way to the last; a whole number of steps.
    """

    step = window = 1

    def __init__(  # noqa: PLR0917 - internal
        self,
        engine: ByteEngine,
        pages: DevicePages,
        numbers: NDArray[np.int64],
        ring: Ring,
        places: Places,
        sums: Sums | None,
        *,
        write: bool,
        lease: Lease | None = None,
    ) -> None:
        self.engine = engine
        self.pages, self.numbers, self.ring, self.places, self.sums = pages, numbers, ring, places, sums
        self.write = write
        self.lease = lease
        self.left = False
        self._reasons = [""] * len(numbers)
        self._flights: deque[tuple[int, Flight]] = deque()  # each with the page behind its last
        self._summer: Summer | None = None
        self._meanwhile: Callable[[], object] | None = None
        self.starting = None if self.memory is None else as_starting(engine)
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Set `step` and `window`."""

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

    def run(self, meanwhile: Callable[[], object]) -> list[str]:
        """Move all pages; "" or a reason for each.

        `meanwhile` is called once, before I/O is waited for; in a write when all of it is under way.
        """
        self._meanwhile = meanwhile
        count = len(self.numbers)
        if self.sums is not None and self.memory is not None:
            lengths = self.summed(0, 0)[1]
            self._summer = self.ring.summer(len(lengths), int(lengths[0]), min(count, self.window))
        try:
            if self.write:
                self._write_all(count)
            else:
                self._read_all(count)
        finally:
            self._end()
        return self._reasons

    def _write_all(self, count: int) -> None:
        """Fill what room there is, start its steps, and go on as the oldest of them end.

        The first step starts as soon as it is filled; then as much is filled at once as was before.
        """
        filled = written = summed = 0
        while written < count:
            most = max(self.step, filled) if self.starting else self.step
            lap = self.window - filled % self.window  # slots that follow each other
            room = min(self.window - (filled - written), lap, most, count - filled)
            if not room:
                written = self._ended(written)
                continue
            stop = filled + room
            if self.ring.usable:
                self.fill(filled, stop)
                self._sum(filled, stop)
                self._wait()
                summed += self._take_sums(filled, stop)
            if self.sums is not None:
                self.sums.known = summed == count
            for first in range(filled, stop, self.step):
                self._start(first, min(first + self.step, stop))
            filled = stop

    def _read_all(self, count: int) -> None:
        """Start steps while there is room; empty those that ended while the others are under way."""
        begun = landed = 0
        while landed < count:
            while begun < count and begun + self.step <= landed + self.window:
                stop = min(begun + self.step, count)
                self._start(begun, stop)
                begun = stop
            ended = self._ended(landed)
            self._sum(landed, ended)
            self._land(landed, ended)
            self._take_sums(landed, ended)
            landed = ended

    def _start(self, start: int, stop: int) -> None:
        """Let the engine begin with some pages."""
        try:
            self._flights.append((stop, self._flight(start, stop)))
        except BaseException:  # interrupted: nobody knows what is under way
            self._leave()
            raise

    def _flight(self, start: int, stop: int) -> Flight:
        if self.lease is not None and self.lease.ended:
            return Settled([ABANDONED] * (stop - start))
        if not self.ring.usable:
            return Settled([_GIVEN_UP] * (stop - start))
        batch = self.batch(start, stop)
        if self.starting is not None:
            return started(self.starting, batch, write=self.write)
        part = self._part(start, stop) if batch.memory is None else None
        if part is not None:
            batch.hook = summing(*self.summed(start, stop), part)
        if stop - start == len(self.numbers):  # nothing goes on beside it
            return Settled(moved(self.engine, batch, write=self.write))
        return self.ring.start(partial(moved, self.engine, batch, write=self.write))

    def _ended(self, start: int) -> int:
        """Wait for the oldest step, which begins at `start`; return where those that have ended end."""
        flights = self._flights
        # There is as much under way as there is room for.
        if self._meanwhile is not None and (not self.write or flights[-1][0] == len(self.numbers)):
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()
        while True:
            stop, flight = flights[0]
            self._reasons[start:stop] = self._answer(flight)
            flights.popleft()
            if not flights or not flights[0][1].done():
                return stop
            start = stop

    def _answer(self, flight: Flight) -> list[str]:
        reasons = flight.result()
        if any(reasons) and any(reason.startswith("timeout") for reason in reasons):
            self._leave()
        return reasons

    def _leave(self) -> None:
        """Never touch the ring again: bytes may still be under way in it."""
        self.ring.usable = False
        self.left = True

    def _end(self) -> None:
        """Wait until nobody touches the ring or the slots (each wait has a deadline), however interrupted.

        Where that is not to be had the ring is given up.
        """
        failed: Flight | None = None
        interrupted: BaseException | None = None
        try:
            while self._flights:
                flight, told = self._flights[0][1], False
                try:
                    told = flight is failed and flight.done()
                    self._answer(flight)
                except BaseException as error:  # noqa: BLE001 - raised below
                    failed, interrupted = flight, error
                    if not told:
                        continue  # it is asked once more
                    self._leave()
                self._flights.popleft()
        finally:
            if self._flights:
                self._leave()
        if interrupted is not None:
            raise interrupted

    def _land(self, start: int, stop: int) -> None:
        """Bring pages that were read to the pool, if its owner still lets us; wait until they are there."""
        lease = self.lease
        if lease is not None and not lease.enter():
            self._reasons[start:stop] = [why or ABANDONED for why in self._reasons[start:stop]]
            return
        try:
            for first, last in good_runs(self._reasons, start, stop):
                self.empty(first, last)
            self._wait()
        finally:
            if lease is not None:
                lease.leave()

    def _wait(self) -> None:
        """Wait for the device; where I/O was under way all the while, that cost nothing."""
        spent = self.ring.wait(self.ring.mark())
        if not self._flights or self._flights[-1][1].done():
            self.ring.waited_s += spent

    # -- checksums ---------------------------------------------------------------------------------------

    def _part(self, start: int, stop: int) -> Sums | None:
        """Return the checksums asked for of some pages, if any."""
        sums = self.sums
        if sums is None or not any(sums.wanted[start:stop]):
            return None
        return Sums(sums.seeds[start:stop], sums.wanted[start:stop], sums.values[start:stop])

    def _sum(self, start: int, stop: int) -> None:
        """Begin with the checksums of pages on a device; those in host memory are the engine's hook's."""
        part, summer = self._part(start, stop), self._summer
        if part is not None and summer is not None:
            summer.submit(self.summed(start, stop)[0], np.array(part.seeds, np.uint64))

    def _take_sums(self, start: int, stop: int) -> int:
        """Take what `_sum` began; returns of how many pages."""
        part, summer = self._part(start, stop), self._summer
        if part is None or summer is None:
            return 0
        part.values[:] = summer.take()
        return stop - start


class RingMove(Move):
    """Pages gathered in a ring, moved as whole slots."""

    def prepare(self) -> None:
        """Take steps of a half each, or small ones; all slots of the ring in turn."""
        pages, numbers, ring = self.pages, self.numbers, self.ring
        self._pitch = self.places.shape.stride
        a_half = ring.slots_a_half(self._pitch)
        least = -(-LEAST_STEP_NBYTES // self._pitch)
        if self.starting is None:
            self.step = max(1, min(a_half, max(least, -(-len(numbers) // HALVES))))
            self.window = HALVES * self.step
        else:
            self.step = min(a_half, least)
            self.window = HALVES * a_half // self.step * self.step
        self._slots = np.arange(len(numbers)) % self.window
        slots = ring.map(pages.geometry, pages.layout, self._pitch)
        ours, theirs = torch.from_numpy(numbers), torch.from_numpy(self._slots)
        sides = (pages.rows, slots, ours, theirs) if self.write else (slots, pages.rows, theirs, ours)
        self._copy = ring_copy(CopyPlan(*sides, check_indices=False), slots, ring.stream)

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

    def prepare(self) -> None:
        """Take long steps, or small ones and as many bytes."""
        nbytes = self.places.shape.page_nbytes
        a_half, least = max(1, STEP_NBYTES // nbytes), -(-LEAST_STEP_NBYTES // nbytes)
        self.step = a_half if self.starting is None else min(a_half, least)
        self.window = HALVES * a_half // self.step * self.step

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
