"""Encryption on the way between pages and any byte engine, on the engine's own threads.

What an engine moves is ciphertext, in memory of the store's own: pages are encrypted to it just before they
are written, and decrypted from it just after they were read, where the engine would compute checksums.
"""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .checksum import memory
from .engine import PageBatch, moved
from .landing import ABANDONED, LeasedBatch
from .record import as_sealed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from .engine import ByteEngine
    from .page_cipher import PageCipher
    from .payload import Places
    from .slab import StoreFile

STEP_NBYTES = 32 << 20
"""Bytes of ciphertext in memory at once, a call."""
_IDLE_BUFFERS = 4


class _Buffers:
    """Memory for ciphertext that is not in use.

    What bytes may still arrive in is never lent again; it stays mapped as long as an engine holds its batch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []

    @contextmanager
    def lent(self, nbytes: int) -> Iterator[Lent]:
        """Lend at least `nbytes` bytes, on a page boundary."""
        with self._lock:
            fits = next((at for at, one in enumerate(self._idle) if len(one) >= nbytes), None)
            found = None if fits is None else self._idle.pop(fits)
        lent = Lent(mmap.mmap(-1, max(nbytes, STEP_NBYTES)) if found is None else found)
        try:
            yield lent
        except BaseException:
            lent.usable = False
            raise
        finally:
            with self._lock:
                if lent.usable and len(self._idle) < _IDLE_BUFFERS:
                    self._idle.append(lent.memory)


@dataclass(slots=True)
class Lent:
    """A buffer on loan; `usable` says whether it may be lent again."""

    memory: mmap.mmap
    usable: bool = True


_BUFFERS = _Buffers()


def _forget_in_child() -> None:
    global _BUFFERS  # noqa: PLW0603 - a thread of the parent may have held its lock
    _BUFFERS = _Buffers()


os.register_at_fork(after_in_child=_forget_in_child)


class _SealedBatch(PageBatch):
    """A batch that keeps its memory mapped as long as the engine may write to it."""

    memory_map: mmap.mmap


class SealedEngine:
    """A byte engine through which the pages of one call move, encrypted.

    Parameters
    ----------
    engine : ByteEngine
        What moves the ciphertext.
    cipher : PageCipher
    records : structured [n]
        Of the pages of the call; a write fills in their tags.
    slots : int64 [n]
    places : Places
        Where the pages lie, in the same order.
    """

    lands = True
    holds_batches = True  # what may be under way is the inner engine's batch

    def __init__(
        self,
        engine: ByteEngine,
        cipher: PageCipher,
        records: NDArray[np.void],
        slots: NDArray[np.int64],
        places: Places,
    ) -> None:
        self._engine, self._cipher = engine, cipher
        self._tags = as_sealed(records)["tag"]
        self._contexts = cipher.contexts(records, slots)
        self._page_nbytes = places.shape.page_nbytes
        self._places = list(zip(places.files, places.offsets.tolist(), strict=True))
        self._rows: dict[tuple[StoreFile, int], int] = {at: row for row, at in enumerate(self._places)}
        self._bad: set[tuple[StoreFile, int]] = set()

    @property
    def name(self) -> str:
        """Of the engine below."""
        return self._engine.name

    @property
    def mode(self) -> str:
        """Of the engine below."""
        return self._engine.mode

    @property
    def wrong(self) -> set[int]:
        """Pages that were read and turned out not to be authentic."""
        return {row for row, place in enumerate(self._places) if place in self._bad} if self._bad else set()

    def write(self, batch: PageBatch) -> list[str]:
        """Encrypt and write every page."""
        return self._move(batch, write=True)

    def read(self, batch: PageBatch) -> list[str]:
        """Read and decrypt every page; what is not authentic is in `wrong`, and no failure of the medium."""
        return self._move(batch, write=False)

    def close(self) -> None:
        """Nothing to do: the engine below is not this one's."""

    def _move(self, batch: PageBatch, *, write: bool) -> list[str]:
        step = max(1, STEP_NBYTES // batch.stride)
        reasons: list[str] = []
        with _BUFFERS.lent(min(step, max(1, len(batch))) * batch.stride) as lent:
            for first in range(0, len(batch), step):
                part = _Step(self, batch, first, min(first + step, len(batch)), lent.memory)
                found = moved(self._engine, part.batch(write=write), write=write)
                reasons += [why or late for why, late in zip(found, part.abandoned, strict=True)]
                if any(why.startswith(("timeout", "engine_error")) for why in found):
                    lent.usable = False  # bytes may still be under way in it
                    reasons += ["not_tried: an earlier part of the batch failed"] * (
                        len(batch) - len(reasons)
                    )
                    break
        return reasons

    def seal(self, row: int, segments: list[memoryview], target: memoryview) -> None:
        """Encrypt a page."""
        tag = self._cipher.seal(self._contexts[row], segments, target)
        self._tags[row] = np.frombuffer(tag, np.uint8)

    def open(self, row: int, source: memoryview, segments: list[memoryview]) -> None:
        """Decrypt a page."""
        if not self._cipher.open(self._contexts[row], self._tags[row].tobytes(), source, segments):
            self._bad.add(self._places[row])

    def row(self, file: StoreFile, offset: int) -> int:
        """Return which page of the call lies there."""
        return self._rows[file, offset]

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page, without what lies between it and its slot's end."""
        return self._page_nbytes


class _Step:
    """Some pages of a batch, and where their ciphertext is."""

    def __init__(self, owner: SealedEngine, batch: PageBatch, first: int, last: int, room: mmap.mmap) -> None:
        self._owner, self._batch, self._first, self._last = owner, batch, first, last
        self._room = memoryview(room)
        self._segments = batch.addresses[first:last].tolist()
        self._lengths = _within(batch.nbytes.tolist(), owner.page_nbytes)
        self._lease = batch.lease if isinstance(batch, LeasedBatch) else None
        self.abandoned = [""] * (last - first)

    def batch(self, *, write: bool) -> PageBatch:
        """Return what the engine is given: whole slots of ciphertext."""
        batch, stride, count = self._batch, self._batch.stride, self._last - self._first
        start = np.uint64(np.frombuffer(self._room, np.uint8).ctypes.data)
        addresses = start + np.arange(count, dtype=np.uint64)[:, None] * np.uint64(stride)
        found = _SealedBatch(
            batch.files[self._first : self._last],
            batch.offsets[self._first : self._last],
            addresses,
            np.array([stride], np.uint64),
            stride,
            stride,
            hook=self._seal if write else self._open,
        )
        found.memory_map = self._room.obj  # type: ignore[assignment]
        return found

    def _seal(self, first: int, last: int) -> None:
        batch, owner = self._batch, self._owner
        for at in range(first, last):
            if batch.hook:
                batch.hook(self._first + at, self._first + at + 1)
            owner.seal(self._row(at), self._views(at), self._slot(at))
            end = (at + 1) * batch.stride  # what lies behind the page is written with it: nothing of another
            self._room[at * batch.stride + owner.page_nbytes : end] = bytes(batch.stride - owner.page_nbytes)

    def _open(self, first: int, last: int) -> None:
        batch, owner, lease = self._batch, self._owner, self._lease
        for at in range(first, last):
            if lease is not None and not lease.enter():
                self.abandoned[at] = ABANDONED
                continue
            try:
                owner.open(self._row(at), self._slot(at), self._views(at))
                if batch.hook:
                    batch.hook(self._first + at, self._first + at + 1)
            finally:
                if lease is not None:
                    lease.leave()

    def _row(self, at: int) -> int:
        page = self._first + at
        return self._owner.row(self._batch.files[page], int(self._batch.offsets[page]))

    def _slot(self, at: int) -> memoryview:
        start = at * self._batch.stride
        return self._room[start : start + self._owner.page_nbytes]

    def _views(self, at: int) -> list[memoryview]:
        """Return the memory of a page's segments."""
        return [
            memoryview(memory(address, nbytes)).cast("B")
            for address, nbytes in zip(self._segments[at], self._lengths, strict=False)
        ]


def _within(lengths: list[int], page_nbytes: int) -> list[int]:
    """Leave out what lies behind the page, where segments cover a whole slot."""
    found: list[int] = []
    left = page_nbytes
    for nbytes in lengths:
        found.append(min(nbytes, left))
        left -= found[-1]
    return found
