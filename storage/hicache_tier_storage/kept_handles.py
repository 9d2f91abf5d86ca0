"""Handles of slabs, as packages open and register them, that stay open from batch to batch."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .slab import SlabDamagedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .slab import StoreFile

MOST = 8


@dataclass(slots=True, eq=False)
class Kept:
    """An open handle: how many batches use it, and whether it is closed once they are done."""

    handle: Any
    users: int = 0
    dropped: bool = False


class KeptHandles:
    """Open handles, least recently used closed first, never one in use.

    Parameters
    ----------
    open_file : callable
        Takes a descriptor of the file, which is closed soon after; returns what has `fileno` and `close`.
    direct : bool
        Whether that descriptor is one of O_DIRECT.
    most : int
        Handles that stay open while nobody uses them.
    """

    def __init__(self, open_file: Callable[[int], Any], *, direct: bool = False, most: int = MOST) -> None:
        self._open_file, self._direct, self._most = open_file, direct, most
        self._lock = threading.Lock()
        self._kept: dict[StoreFile, Kept] = {}

    @contextmanager
    def batch(self) -> Iterator[Batch]:
        """Lend handles for the length of a block."""
        self.trim(self._most)
        batch = Batch(self)
        try:
            yield batch
        finally:
            with self._lock:
                for kept in batch.lent:
                    self._done(kept)

    def take(self, file: StoreFile) -> Kept:
        """Return a handle of the very file that the store made, and count its user.

        Raises
        ------
        SlabDamagedError, OSError
        """
        with self._lock:
            kept = self._kept.pop(file, None)
            if kept is None:
                with file.open(direct=self._direct) as fd:  # says what is wrong as the other engines do
                    kept = Kept(self._open_file(fd))
            kept.users += 1
            try:
                file.check(kept.handle.fileno())
            except SlabDamagedError:
                kept.dropped = True
                self._done(kept)
                raise
            self._kept[file] = kept  # most recently used last
            return kept

    def close(self) -> None:
        """Close all, those in use once they are given back."""
        self.trim(0)
        with self._lock:
            for kept in self._kept.values():
                kept.dropped = True
            self._kept.clear()

    def forget(self, lent: list[Kept]) -> None:
        """Never close these: their I/O may not have ended."""
        with self._lock:
            for kept in lent:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept.handle))
                kept.users += 1  # which is never given back
            self._kept = {file: kept for file, kept in self._kept.items() if kept not in lent}

    def __len__(self) -> int:
        return len(self._kept)

    def numbers(self) -> list[int]:
        """Return the descriptors that are open."""
        return [kept.handle.fileno() for kept in self._kept.values()]

    def trim(self, most: int) -> None:
        """Close idle handles: of files that were removed, and the least recently used."""
        with self._lock:
            idle = [file for file, kept in self._kept.items() if not kept.users]
            gone = {file for file in idle if not os.fstat(self._kept[file].handle.fileno()).st_nlink}
            excess = len(self._kept) - len(gone) - most
            gone.update([file for file in idle if file not in gone][: max(0, excess)])
            for file in gone:
                self._kept.pop(file).handle.close()

    @staticmethod
    def _done(kept: Kept) -> None:
        kept.users -= 1
        if kept.dropped and not kept.users:
            kept.handle.close()


class Batch:
    """The handles that one batch uses."""

    def __init__(self, handles: KeptHandles) -> None:
        self._handles = handles
        self._by_file: dict[StoreFile, Kept] = {}
        self.lent: list[Kept] = []

    def handle(self, file: StoreFile) -> Any:  # noqa: ANN401 - of the package
        """Return a handle; raises as `KeptHandles.take` does."""
        kept = self._by_file.get(file)
        if kept is None:
            kept = self._by_file[file] = self._handles.take(file)
            self.lent.append(kept)
        return kept.handle

    def forget(self) -> None:
        """Never close the handles of this batch."""
        self._handles.forget(self.lent)
