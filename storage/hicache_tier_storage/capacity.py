"""The cap on a root: one number of bytes for all namespaces, ranks and writers together.

Slabs are the unit. A writer takes a new slab under the root's lock while the sum stays within the cap; else
slabs of writers that are gone are taken back, coldest first; else live writers above their fair share are
asked to give one up (`.hct.demand`), which they do within a second.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .partition import PartitionPaths, remove_slab
from .record import ACCESS_WORD, RECORD_WORDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOCK_NAME = ".hct.lock"
_DEMAND_NAME = ".hct.demand"
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
PARTITION_NAME = re.compile(r"((?:[a-z]+\d+of\d+)(?:-[a-z]+\d+of\d+)*)-w(\d+)")
_RESERVE_NBYTES = 1 << 30


def partition_paths(root: Path, namespace: str | None = None) -> Iterator[PartitionPaths]:
    """Walk the partitions of a root, or of one namespace, by the names the format gives them."""
    for space in _directories(root):
        if not _NAMESPACE.fullmatch(space.name) or namespace not in {None, space.name}:
            continue
        for rank in _directories(space):
            if PARTITION_NAME.fullmatch(rank.name):
                for pool in _directories(rank):
                    yield PartitionPaths(pool)


def _directories(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.is_symlink())
    except (FileNotFoundError, NotADirectoryError):
        return []


@dataclass(frozen=True, slots=True)
class _SlabUse:
    paths: PartitionPaths
    number: int
    slab: Path
    table: Path
    nbytes: int


def _slabs(paths: PartitionPaths) -> list[_SlabUse]:
    found = []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(paths.pages) as entries:
        for entry in entries:
            parts = entry.name.split(".")
            if parts[0] != "c" or len(parts) < 2 or not parts[1].isdecimal() or parts[-1] == "tmp":
                continue
            number = int(parts[1])
            table = paths.table(number)
            nbytes = entry.stat(follow_symlinks=False).st_size
            with suppress(FileNotFoundError):
                nbytes += table.stat().st_size
            found.append(_SlabUse(paths, number, paths.pages / entry.name, table, nbytes))
    return found


class RootBudget:
    """Bytes of a root against its cap.

    Parameters
    ----------
    root : Path
    capacity_nbytes : int
    """

    def __init__(self, root: Path, capacity_nbytes: int) -> None:
        self.root = root
        self.capacity_nbytes = capacity_nbytes
        self._demand_seen = self._demand_time()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the root's lock: creation, growth and removal of slabs happen under it."""
        fd = os.open(self.root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def used_nbytes(self) -> int:
        """Bytes of all slabs and tables under the root, live or left behind."""
        return sum(use.nbytes for paths in partition_paths(self.root) for use in _slabs(paths))

    def room_for(self, nbytes: int, own: PartitionPaths) -> str:
        """Make room for one slab; return "" or why there is none. The lock must be held."""
        stat = os.statvfs(self.root)
        reserve = min(_RESERVE_NBYTES, stat.f_blocks * stat.f_frsize // 100)
        while True:
            over = self.used_nbytes() + nbytes > self.capacity_nbytes
            free = os.statvfs(self.root)
            short = free.f_bavail * free.f_frsize < nbytes + reserve
            if not over and not short:
                return ""
            if not self.reclaim(own):
                return "capacity" if over else "disk_full"

    def reclaim(self, own: PartitionPaths) -> bool:
        """Remove the coldest slab of a partition that no live writer holds. The lock must be held."""
        coldest: tuple[int, _SlabUse] | None = None
        for paths in partition_paths(self.root):
            if paths == own:
                continue
            with writer_lock(paths) as dead:
                if not dead:
                    continue
                for use in _slabs(paths):
                    heat = _newest_access(use.table)
                    if coldest is None or heat < coldest[0]:
                        coldest = (heat, use)
        if coldest is None:
            return False
        use = coldest[1]
        with writer_lock(use.paths) as dead:
            if not dead:
                return True  # taken over meanwhile; look again
            remove_slab(use.slab, use.table)
        return True

    def ask_for_room(self) -> None:
        """Ask live writers above their fair share to give up a slab."""
        path = self.root / _DEMAND_NAME
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.utime(fd)
        finally:
            os.close(fd)
        self._demand_seen = self._demand_time()  # not a demand on ourselves

    def excess(self, own: PartitionPaths) -> bool:
        """Whether another writer asks for room and this one holds more than its fair share."""
        stamp = self._demand_time()
        if stamp == self._demand_seen:
            return False
        self._demand_seen = stamp
        with self.lock():
            live = sum(1 for paths in partition_paths(self.root) if paths == own or not _is_dead(paths))
            mine = sum(use.nbytes for use in _slabs(own))
            return mine > self.capacity_nbytes // max(1, live)

    def over(self) -> bool:
        """Whether the root holds more than the cap (it was lowered)."""
        return self.used_nbytes() > self.capacity_nbytes

    def _demand_time(self) -> int:
        try:
            return (self.root / _DEMAND_NAME).stat().st_mtime_ns
        except FileNotFoundError:
            return 0


@contextmanager
def writer_lock(paths: PartitionPaths) -> Iterator[bool]:
    """Try to hold a partition's writer lock; yields False where a live writer has it."""
    try:
        fd = os.open(paths.lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(fd)


def _is_dead(paths: PartitionPaths) -> bool:
    with writer_lock(paths) as dead:
        return dead


def _newest_access(table: Path) -> int:
    try:
        raw = np.fromfile(table, np.uint64)
    except OSError:
        return 0
    whole = len(raw) // RECORD_WORDS * RECORD_WORDS
    return int(raw[:whole].reshape(-1, RECORD_WORDS)[:, ACCESS_WORD].max(initial=0))
