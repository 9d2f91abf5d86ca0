"""Slot tables of a partition, mapped into memory, read and written a batch at a time."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
import weakref
from typing import TYPE_CHECKING

import numpy as np

from .inside import open_inside
from .record import GENERATION_WORD, RECORD_NBYTES, RECORD_WORDS
from .slab import SlabDamagedError, StoreFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from .record import Words

_LIBC = ctypes.CDLL(None, use_errno=True)
_MMAP, _MUNMAP = _LIBC.mmap, _LIBC.munmap
_MMAP.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_MMAP.restype = ctypes.c_void_p
_MUNMAP.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MANY = 64  # rows of a table at once, from which on it is worth telling whether they are a slice
_MAP_FAILED = ctypes.c_void_p(-1).value


class MappedTable:
    """The slot table of one slab as `uint64 [S, 16]`, shared with every process that maps it.

    No descriptor stays open: a store may have more slabs than a process may have files. The file is looked at
    by its path before the map is touched. Another program that cuts it between that look and the touch ends
    the process (SIGBUS): a store's files are its own.
    """

    def __init__(self, file: StoreFile) -> None:
        self.file = file
        self._path = os.fspath(file.path)
        try:
            fd = open_inside(file.path, file.depth, os.O_RDWR if file.writable else os.O_RDONLY)
        except FileNotFoundError as error:
            raise SlabDamagedError(f"{file.path.name} is missing") from error
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.EISDIR, errno.ENXIO}:
                raise SlabDamagedError(f"{file.path.name} is no plain file") from error
            raise
        try:
            file.check(fd)
            self.words: Words = _map(fd, file.nbytes, writable=file.writable).reshape(-1, RECORD_WORDS)
        finally:
            os.close(fd)

    def check(self) -> None:
        """Raise `SlabDamagedError` where the file was cut or replaced: touching the map could be fatal."""
        try:
            stat = os.stat(self._path, follow_symlinks=False)  # noqa: PTH116 - twice as fast as Path's
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SlabDamagedError(f"{self.file.path.name} is missing") from error
        except OSError:
            return  # access denied, say: that tells nothing of the file that is mapped
        # The map holds on to the inode, so that no other file gets its number.
        if (stat.st_dev, stat.st_ino) != self.file.identity:
            raise SlabDamagedError(f"{self.file.path.name} was replaced by another program")
        if stat.st_size != self.file.nbytes:
            raise SlabDamagedError(
                f"{self.file.path.name} has {stat.st_size} bytes instead of {self.file.nbytes}"
            )

    def sync(self) -> None:
        """Write the table's dirty pages to disk."""
        self.file.sync()
        self.file.forget()

    def close(self) -> None:
        """Let go of the map; it goes with the last view of it."""
        del self.words


def _map(fd: int, nbytes: int, *, writable: bool) -> NDArray[np.uint64]:
    """Map a whole file; unlike `mmap.mmap`, without a descriptor of its own."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _MMAP(None, nbytes, access, mmap.MAP_SHARED, fd, 0)
    if address in {None, _MAP_FAILED}:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, _MUNMAP, address, nbytes).atexit = False  # threads may still look at it
    words = np.frombuffer(memoryview(memory).cast("B"), np.uint64)
    words.flags.writeable = writable
    return words


class SlotTables:
    """All tables of a partition, addressed by slot number.

    Parameters
    ----------
    slots_per_slab : int
        A power of two.
    """

    def __init__(self, slots_per_slab: int) -> None:
        self._shift = slots_per_slab.bit_length() - 1
        self._mask = slots_per_slab - 1
        self.slots_per_slab = slots_per_slab
        self.tables: dict[int, MappedTable] = {}

    def slabs_of(self, slots: NDArray[np.int64]) -> list[int]:
        """Return the slabs that hold these slots."""
        if not len(slots):
            return []
        owner = slots >> self._shift
        first = int(owner[0])
        if (owner == first).all():
            return [first]
        starts = np.flatnonzero(owner[1:] != owner[:-1]) + 1  # few: slots mostly come in order
        return sorted({first, *owner[starts].tolist()})

    def damaged(self, slots: NDArray[np.int64]) -> dict[int, str]:
        """Check the tables under these slots; return each unusable slab and why."""
        bad: dict[int, str] = {}
        for slab in self.slabs_of(slots):
            table = self.tables.get(slab)
            try:
                if table is None:
                    raise SlabDamagedError(f"slab {slab} is not there")  # noqa: TRY301
                table.check()
            except (SlabDamagedError, OSError) as error:
                bad[slab] = str(error)
        return bad

    def _groups(
        self, slots: NDArray[np.int64]
    ) -> Iterator[tuple[Words, NDArray[np.int64] | slice, NDArray[np.int64] | slice]]:
        """Yield the table of each slab, where its slots are among `slots`, and their rows in the table."""
        slabs = self.slabs_of(slots)
        if len(slabs) == 1:
            yield self._words(slabs[0]), slice(None), _as_slice(slots & self._mask)
            return
        owner = slots >> self._shift
        for slab in slabs:
            where = _as_slice(np.flatnonzero(owner == slab))
            yield self._words(slab), where, _as_slice(slots[where] & self._mask)

    def _words(self, slab: int) -> Words:
        """Return a table; `SlabDamagedError` where another thread let go of it just now."""
        try:
            return self.tables[slab].words
        except (KeyError, AttributeError) as gone:
            raise SlabDamagedError(f"slab {slab} is not there") from gone

    def gather(self, slots: NDArray[np.int64]) -> Words:
        """Copy the records of `slots`, `uint64 [n, 16]`."""
        out = np.empty((len(slots), RECORD_WORDS), np.uint64)
        for words, where, index in self._groups(slots):
            out[where] = words[index]
        return out

    def generations(self, slots: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Copy the generations of `slots`, each loaded as one aligned word."""
        out = np.empty(len(slots), np.uint64)
        for words, where, index in self._groups(slots):
            out[where] = words[index, GENERATION_WORD]
        return out

    def mark_writing(self, slots: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Make the generations of `slots` odd, before anything else changes; return them.

        A slot's first generation is taken from the clock: a record of a slab that was given up never looks
        like one of a later slab of the same number.
        """
        odd = self.generations(slots) | np.uint64(1)
        odd[odd == 1] = time.time_ns() | 1
        for words, where, index in self._groups(slots):
            words[index, GENERATION_WORD] = odd[where]
        return odd

    def publish(self, slots: NDArray[np.int64], records: Words) -> None:
        """Store records whose even generation goes last. The slots' generations must be odd."""
        for words, where, index in self._groups(slots):
            batch = records[where]
            words[index, GENERATION_WORD + 1 :] = batch[:, GENERATION_WORD + 1 :]
            words[index, 0] = batch[:, 0]
            words[index, GENERATION_WORD] = batch[:, GENERATION_WORD]

    def close(self) -> None:
        """Unmap all tables."""
        for table in self.tables.values():
            table.close()
        self.tables.clear()


def _as_slice(index: NDArray[np.int64]) -> NDArray[np.int64] | slice:
    """Return a slice in place of many numbers that follow each other: it is several times as fast."""
    first, count = int(index[0]), len(index)
    if count >= _MANY and int(index[-1]) - first == count - 1 and (index[1:] > index[:-1]).all():
        return slice(first, first + count)
    return index


def table_nbytes(slots_per_slab: int) -> int:
    """Bytes of the slot table of one slab."""
    return slots_per_slab * RECORD_NBYTES
