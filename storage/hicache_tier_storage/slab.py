"""Slab files: S slots of `stride` bytes, then a static shard index.

A slab is one Zarr shard whose index is full from the start, so that a slot is reused by writing in place.
Which slots are live is told by the slot table alone.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np

from .access import Access
from .inside import folder_of, open_inside
from .metadata import create_new, temporary_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLOT_ALIGNMENT = 4096
SLAB_TARGET_NBYTES = 1 << 30
SLABS_A_CAPACITY = 16  # a capacity is cut in about this many slabs, so that it can shrink and be shared


@dataclass(frozen=True, slots=True)
class SlabShape:
    """Sizes of every slab of a partition: bytes, and slots a slab (a power of two)."""

    page_nbytes: int
    stride: int
    slots: int

    @classmethod
    def choose(cls, page_nbytes: int, capacity_nbytes: int) -> SlabShape:
        """Pick the slots a slab: about 1 GiB, less where the capacity is small."""
        stride = -(-page_nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        target = min(SLAB_TARGET_NBYTES, capacity_nbytes // SLABS_A_CAPACITY)
        slots = 1 << max(0, (target // stride).bit_length() - 1)
        return cls(page_nbytes, stride, slots)

    @property
    def data_nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.stride

    @property
    def file_nbytes(self) -> int:
        """Bytes of the whole file, its index and the index's CRC."""
        return self.data_nbytes + 16 * self.slots + 4

    def tail(self) -> bytes:
        """Shard index (offset and length of every slot) and its CRC32C."""
        index = np.empty((self.slots, 2), "<u8")
        index[:, 0] = np.arange(self.slots, dtype=np.uint64) * np.uint64(self.stride)
        index[:, 1] = self.page_nbytes
        raw = index.tobytes()
        return raw + int(google_crc32c.value(raw)).to_bytes(4, "little")


def create_slab(path: Path, shape: SlabShape, depth: int = 1, access: Access = Access.PRIVATE) -> None:
    """Make a slab beside `path`, sync it, and rename it into place; `depth` as of `inside.open_inside`.

    Raises
    ------
    OSError
        Where the disk is full or read-only; nothing is left behind.
    """
    temporary = temporary_name(path).name
    with folder_of(path, depth) as folder:
        fd = create_new(temporary, folder, access)
        try:
            try:
                os.posix_fallocate(fd, 0, shape.file_nbytes)
                os.pwrite(fd, shape.tail(), shape.data_nbytes)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)


class SlabDamagedError(Exception):
    """A slab or slot table is not the file that the store made: replaced, cut, grown or gone."""


class StoreFile:
    """One file of a store, opened on demand and checked to be the same file each time.

    Parameters
    ----------
    path : Path
    nbytes : int
        Size that the file must have.
    cache : FileCache
        Bounds how many files are open at once.
    writable : bool
    depth : int
        As of `inside.open_inside`.
    """

    __slots__ = ("_cache", "depth", "identity", "nbytes", "path", "writable")

    def __init__(self, path: Path, nbytes: int, cache: FileCache, *, writable: bool, depth: int = 1) -> None:
        self.path = path
        self.depth = depth
        self.nbytes = nbytes
        self.writable = writable
        self._cache = cache
        self.identity: tuple[int, int] | None = None

    def check(self, fd: int) -> None:
        """Raise `SlabDamagedError` unless `fd` is the whole, linked file seen first."""
        stat = os.fstat(fd)
        identity = (stat.st_dev, stat.st_ino)
        if self.identity is None:
            self.identity = identity
        if stat.st_nlink == 0 or identity != self.identity:
            raise SlabDamagedError(f"{self.path.name} was replaced by another program")
        if stat.st_size != self.nbytes:
            raise SlabDamagedError(f"{self.path.name} has {stat.st_size} bytes instead of {self.nbytes}")

    @contextmanager
    def open(self, *, direct: bool) -> Iterator[int]:
        """Borrow a descriptor; it stays open until the block ends.

        Raises
        ------
        SlabDamagedError
            Where the file is not the store's any more.
        OSError
            Where it cannot be opened.
        """
        try:
            borrowed = self._cache.acquire((self.path, direct), self._flags(direct=direct), self.depth)
        except FileNotFoundError as error:
            raise SlabDamagedError(f"{self.path.name} is missing") from error
        try:
            self.check(borrowed.fd)
            yield borrowed.fd
        finally:
            self._cache.release(borrowed)

    def _flags(self, *, direct: bool) -> int:
        access = os.O_RDWR if self.writable else os.O_RDONLY
        return access | (os.O_DIRECT if direct else 0)

    def sync(self) -> None:
        """Write what the kernel still holds of this file to disk."""
        with self.open(direct=False) as fd:
            os.fdatasync(fd)

    def forget(self) -> None:
        """Close cached descriptors, so that the path may be unlinked or replaced by the store itself.

        The file's identity stays: I/O still under way never takes a later file of that name for this one.
        """
        for direct in (False, True):
            self._cache.drop((self.path, direct))


@dataclass(slots=True, eq=False)
class Descriptor:
    """An open file: how many borrow it, and whether it is closed once they are done."""

    fd: int
    users: int = 0
    dropped: bool = False


class FileCache:
    """Open descriptors, least recently used closed first, never one that is borrowed."""

    def __init__(self, limit: int) -> None:
        self._limit = max(2, limit)
        self._lock = Lock()
        self._closed = False
        self._open: dict[tuple[Path, bool], Descriptor] = {}

    def acquire(self, key: tuple[Path, bool], flags: int, depth: int = 1) -> Descriptor:
        """Return an open descriptor and count its user; `flags` and `depth` as of `inside.open_inside`."""
        with self._lock:
            entry = self._open.pop(key, None)
            if entry is None:
                self._make_room()
                entry = Descriptor(open_inside(key[0], depth, flags), dropped=self._closed)
            if not self._closed:
                self._open[key] = entry  # most recently used last
            entry.users += 1
            return entry

    def release(self, entry: Descriptor) -> None:
        """Give a descriptor back."""
        with self._lock:
            entry.users -= 1
            if entry.dropped and not entry.users:
                os.close(entry.fd)

    def drop(self, key: tuple[Path, bool]) -> None:
        """Close a descriptor now, or once its users are done; it is not lent again."""
        with self._lock:
            entry = self._open.pop(key, None)
            if entry is None:
                return
            entry.dropped = True
            if not entry.users:
                os.close(entry.fd)

    def close(self) -> None:
        """Close everything, what is borrowed once it is given back."""
        with self._lock:
            self._closed = True
            for entry in self._open.values():
                entry.dropped = True
                if not entry.users:
                    os.close(entry.fd)
            self._open.clear()

    def after_fork(self) -> None:
        """Let a child of fork not wait for a lock that a thread of its parent held."""
        self._lock = Lock()

    def _make_room(self) -> None:
        while len(self._open) >= self._limit:
            idle = next((key for key, entry in self._open.items() if not entry.users), None)
            if idle is None:
                return
            os.close(self._open.pop(idle).fd)
