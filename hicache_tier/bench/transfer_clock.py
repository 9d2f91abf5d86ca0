"""Clocks and C: how long a transfer takes, and how long a contiguous copy of as many bytes takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Protocol

import torch

from .gpu import new_event, new_stream, seconds_between

if TYPE_CHECKING:
    from collections.abc import Callable

    Work = Callable[[], None]
    """Submits work that the current stream waits for."""


@dataclass(frozen=True, slots=True)
class Lap:
    """Seconds of one run: by the device's clock where there is one, and by the caller's."""

    device: float
    wall: float


_ALIGNMENT = 4096


class Clock(Protocol):
    """Times work on one device."""

    device: torch.device

    def lap(self, work: Work) -> Lap:
        """Run `work` on an idle device and return when it has finished."""

    def settle(self) -> None:
        """Wait until the device is idle."""


class CudaClock:
    """Events on the stream that the benchmark works on, and the caller's clock beside them.

    Attributes
    ----------
    device : torch.device
    stream : torch.cuda.Stream
        Current within `lap`; where the transfers' own streams are waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = new_stream(device)
        self._events = [new_event() for _ in range(2)]

    def lap(self, work: Work) -> Lap:
        """Return the time from before the first call to when the last byte has arrived."""
        start, end = self._events
        self.settle()
        with torch.cuda.stream(self.stream):
            begun = time.perf_counter()
            start.record(self.stream)
            work()
            end.record(self.stream)
            end.synchronize()
            wall = time.perf_counter() - begun
        return Lap(seconds_between(start, end), wall)

    def settle(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(self.device)


class CpuClock:
    """The caller's clock: engines on a CPU have finished when a call returns."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def lap(self, work: Work) -> Lap:
        """Return the time that the calls take."""
        begun = time.perf_counter()
        work()
        wall = time.perf_counter() - begun
        return Lap(wall, wall)

    def settle(self) -> None:
        """Nothing runs behind the caller's back."""


def make_clock(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


class Link:
    """Contiguous copies of pinned memory: the ceiling C.

    Parameters
    ----------
    clock : Clock
    nbytes : int
        Of both buffers, which hold random bytes. Larger copies go through them more than once; smaller
        ones start somewhere else each time, so that no cache holds what they read.
    """

    def __init__(self, clock: Clock, nbytes: int) -> None:
        self._clock = clock
        self._nbytes = nbytes
        self._far = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=clock.device)
        self._near = torch.empty(nbytes, dtype=torch.uint8, pin_memory=clock.device.type == "cuda")
        self._near.copy_(self._far)
        self._at = 0

    def copy(self, link: str, nbytes: int) -> None:
        """Submit one copy, `h2d` or `d2h`, on the current stream."""
        left = nbytes
        while left:
            size = min(left, self._nbytes)
            self._at = 0 if self._at + size > self._nbytes else self._at
            near, far = (buffer[self._at : self._at + size] for buffer in (self._near, self._far))
            if link == "d2h":
                near.copy_(far, non_blocking=True)
            else:
                far.copy_(near, non_blocking=True)
            self._at += -(-size // _ALIGNMENT) * _ALIGNMENT
            left -= size

    def laps(self, link: str, nbytes: int, repeats: int) -> list[float]:
        """Return the seconds of `repeats` copies, after one that does not count."""
        laps = [self._clock.lap(lambda: self.copy(link, nbytes)).device for _ in range(repeats + 1)]
        return laps[1:]

    def gb_s(self, link: str, repeats: int) -> float:
        """Return C over the whole buffer."""
        return self._nbytes / median(self.laps(link, self._nbytes, repeats)) / 1e9
