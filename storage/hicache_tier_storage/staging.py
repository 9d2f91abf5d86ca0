"""Rings that pages of a device are staged in: whole slots, on the device or in host memory.

A ring is lent to one call at a time and kept for the next. One whose bytes may still be under way is never
lent again.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from hicache_tier_kernels.engine import new_event, new_stream

from .daemon_pool import DaemonPool
from .device_bytes import own_memory
from .device_sums import summer
from .engine import DeviceMemory
from .slab import SLOT_ALIGNMENT
from .slot_map import slot_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout
    from hicache_tier_kernels import RowMap

    from .device_sums import Summer
    from .lease import Lease

_T = TypeVar("_T")
HALF_NBYTES = 32 << 20
HALVES = 2
_RINGS = 4  # of a kind, at once
_SUMMERS = 8  # shapes of pages that a ring remembers
_DEADLINE_S = 60.0
_SPIN_S, _PAUSE_S = 200e-6, 50e-6
_LOOK_S = 0.02  # whether a ring is free


class StagingError(Exception):
    """A ring, or the device, is not to be had in time; the message is the verdict on the pages."""


@dataclass(frozen=True, slots=True)
class RingKind:
    """What a ring is for.

    Attributes
    ----------
    pool : torch.device
        Where pages come from or go to.
    user : str
        The kind of engine that moves the ring's own memory on that device; "" for a ring in host memory,
        pinned where the pool is on a CUDA device. cuFile registers memory once a process, so kinds of
        engines do not share it.
    write : bool
        Whether pages go to slots: engines keep reads and writes apart.
    half_nbytes : int
        0 where nothing is staged, and the stream is all that is needed.
    """

    pool: torch.device
    user: str
    write: bool
    half_nbytes: int

    @classmethod
    def fitting(cls, pool: torch.device, stride: int, user: str, *, write: bool) -> RingKind:
        """Return the kind of ring for slots of `stride` bytes: one slot a half at least."""
        return cls(pool, user, write, max(HALF_NBYTES, stride))


class Ring:
    """Memory, and the stream on which pages go in and out of it.

    An engine that blocks is given one half while the other is filled or emptied.

    Attributes
    ----------
    address : int
        A multiple of 4096.
    memory : DeviceMemory or None
        Where the ring is on a device.
    stream : torch.cuda.Stream or None
        None where nothing is on a device: all is done on the spot.
    usable : bool
        Whether it may be lent again.
    waited_s : float
        Seconds that calls waited for the device while none of their I/O was under way: what staging costs.
    """

    def __init__(self, kind: RingKind) -> None:
        self.kind = kind
        self.usable = True
        self.waited_s = 0.0
        cuda = kind.pool.type == "cuda"
        total = HALVES * -(-kind.half_nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        raw = _memory(total + SLOT_ALIGNMENT, kind)
        skew = -raw.data_ptr() % SLOT_ALIGNMENT
        self._bytes = raw[skew : skew + total]
        self.address = self._bytes.data_ptr()
        self.stream = new_stream(kind.pool, priority=-1) if cuda else None
        region = ((self.address, total),)
        self.memory = None
        if cuda and kind.user:
            self.memory = DeviceMemory(kind.pool.index or 0, region, self, staging=True)
        self._workers: DaemonPool | None = None
        self._bound = threading.local()
        self._maps: dict[tuple[KVGeometry, str, int], RowMap] = {}
        self._summers: dict[tuple[int, int], tuple[int, Summer]] = {}
        if cuda:
            self._settle()

    def _settle(self) -> None:
        """Wait for what the device may still do with memory that belonged to somebody else."""
        self.wait(given_so_far(self.kind.pool))

    def summer(self, fragments: int, nbytes: int, pages: int) -> Summer | None:
        """Return what computes checksums of `pages` pages at a time on the device; it is kept.

        None where nothing is on a device.
        """
        if self.stream is None:
            return None
        key = (fragments, nbytes)
        room, found = self._summers.get(key, (0, None))
        if found is None or room < pages:
            found = summer(fragments, nbytes, pages, self.stream)
            self._settle()
            if len(self._summers) >= _SUMMERS:
                self._summers.clear()
            self._summers[key] = (pages, found)
        return found

    def slots_a_half(self, pitch: int) -> int:
        """Slots of `pitch` bytes that a half holds."""
        return self._bytes.nbytes // HALVES // pitch

    def slots(self, first: int, count: int, pitch: int) -> torch.Tensor:
        """Return the bytes of some slots, `[count, pitch]`."""
        return self._bytes[first * pitch : (first + count) * pitch].view(count, pitch)

    def map(self, geometry: KVGeometry, layout: Layout, pitch: int) -> RowMap:
        """Return the rows of all slots."""
        key = (geometry, layout.page_axes, pitch)
        found = self._maps.get(key)
        if found is None:
            whole = self._bytes[: HALVES * self.slots_a_half(pitch) * pitch]
            found = self._maps[key] = slot_map(whole, geometry, layout, pitch)
        return found

    def blank_gaps(self, first: int, count: int, pitch: int, page_nbytes: int) -> None:
        """Zero what lies between pages: it is written with them, and may be left of anybody's page."""
        if page_nbytes == pitch:
            return
        gaps = self.slots(first, count, pitch)[:, page_nbytes:]
        if self.memory is None:
            gaps.zero_()
            return
        with torch.cuda.stream(self.stream):
            gaps.zero_()

    def start(self, work: Callable[[], _T]) -> Future[_T]:
        """Let a thread of the ring's own do something, one a half at most."""
        if self._workers is None:
            self._workers = DaemonPool(HALVES, "hct-ring")
        return self._workers.submit(self._run, work)

    def _run(self, work: Callable[[], _T]) -> _T:
        self.bind()
        with on_device(self.kind.pool):
            return work()

    def bind(self) -> None:
        """Make the device's context this thread's: packages of CUDA want one."""
        device = self.kind.pool
        if device.type == "cuda" and not hasattr(self._bound, "yes"):
            torch.cuda.mem_get_info(device)
            self._bound.yes = True

    def mark(self) -> torch.cuda.Event | None:
        """Return what tells when all that was enqueued so far is done."""
        if self.stream is None:
            return None
        event = new_event()
        event.record(self.stream)
        return event

    def wait(self, mark: torch.cuda.Event | None) -> float:
        """Wait for the device; return the seconds.

        Raises
        ------
        StagingError
            Where it does not get there; the ring is given up.
        """
        if mark is None:
            return 0.0
        start = time.monotonic()
        spent = 0.0
        while not mark.query():  # type: ignore[no-untyped-call]
            spent = time.monotonic() - start
            if spent > _DEADLINE_S:
                self.usable = False
                raise StagingError(f"device_timeout: the device did not answer within {_DEADLINE_S:.0f} s")
            if spent > _SPIN_S:
                time.sleep(_PAUSE_S)
        return spent


def _memory(nbytes: int, kind: RingKind) -> torch.Tensor:
    """Return the bytes of a ring."""
    if not kind.half_nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    if kind.user:
        return own_memory(nbytes, kind.pool)
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=kind.pool.type == "cuda")


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one for a block; nothing for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def given_so_far(device: torch.device) -> torch.cuda.Event | None:
    """Return what tells when all is done that this thread's current stream was given; None for the CPU."""
    if device.type != "cuda":
        return None
    event = new_event()
    event.record(torch.cuda.current_stream(device))
    return event


def aside(device: torch.device) -> AbstractContextManager[object]:
    """Make a stream current for a block that nobody else gives work to; nothing for the CPU.

    What a call there needs done before is waited for by an event: the stream that is current on a thread by
    default may be the one that the model runs on.
    """
    return torch.cuda.stream(new_stream(device)) if device.type == "cuda" else nullcontext()


class _Rings:
    """Rings that exist, by kind: idle ones, and the leases of the calls that they are lent to.

    A call whose lease has ended keeps its ring, and does not keep others from having one.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.changed = threading.Condition()
        self.idle: dict[RingKind, list[Ring]] = {}
        self.lent: dict[RingKind, list[Lease | None]] = {}
        self.given_up: list[Ring] = []  # bytes may still arrive in them: kept for ever

    def take(self, kind: RingKind, lease: Lease | None) -> Ring:
        until_s = time.monotonic() + _DEADLINE_S
        with self.changed:
            lent = self.lent.setdefault(kind, [])
            while sum(one is None or not one.ended for one in lent) >= _RINGS:
                if time.monotonic() > until_s:
                    raise StagingError(f"device_busy: no staging memory was free within {_DEADLINE_S:.0f} s")
                self.changed.wait(_LOOK_S)  # the end of a lease is not told
            lent.append(lease)
            idle = self.idle.get(kind)
            if idle:
                return idle.pop()
        try:
            return Ring(kind)
        except BaseException:
            self._returned(kind, lease)
            raise

    def give_back(self, ring: Ring, lease: Lease | None) -> None:
        with self.changed:
            self.waited_s += ring.waited_s
            ring.waited_s = 0.0
            idle = self.idle.setdefault(ring.kind, [])
            if not ring.usable:
                self.given_up.append(ring)
            elif len(idle) < _RINGS:
                idle.append(ring)
        self._returned(ring.kind, lease)

    def _returned(self, kind: RingKind, lease: Lease | None) -> None:
        with self.changed:
            self.lent[kind].remove(lease)
            self.changed.notify()


_RINGS_OF_PROCESS = _Rings()


def waited_s() -> float:
    """Return the seconds that calls of this process waited for devices, with no I/O of theirs under way."""
    return _RINGS_OF_PROCESS.waited_s


@contextmanager
def lent_ring(kind: RingKind, lease: Lease | None = None) -> Iterator[Ring]:
    """Lend a ring for a block; what the device still does with it is waited for at the end.

    Parameters
    ----------
    kind : RingKind
    lease : Lease, optional
        Of the call: others have not to wait for the ring of one that was left.
    """
    rings = _RINGS_OF_PROCESS
    ring = rings.take(kind, lease)
    try:
        yield ring
    finally:
        try:
            if ring.usable:
                ring.waited_s += ring.wait(ring.mark())
        except BaseException:
            ring.usable = False
            raise
        finally:
            rings.give_back(ring, lease)


def _forget_in_child() -> None:
    global _RINGS_OF_PROCESS  # noqa: PLW0603 - a child of fork has no device
    left = _RINGS_OF_PROCESS
    _RINGS_OF_PROCESS = _Rings()
    _RINGS_OF_PROCESS.given_up = [*left.given_up, *(ring for idle in left.idle.values() for ring in idle)]


os.register_at_fork(after_in_child=_forget_in_child)
