"""The cap on a root: one number of bytes for all namespaces, ranks and writers together.

Slabs are the unit. A writer takes a new slab under the root's lock while the sum stays within the cap; else
slabs of writers that are gone are taken back, coldest first; else live writers above their fair share are
asked to give one up (`.hct.demand`), which they do within a second. Only a writer below its fair share asks,
and as long as it does no writer that holds more takes what was freed.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier.errors import StoreError

from .access import Access
from .inside import ARRAY_FILE, PARTITION_FILE, ROOT_FILE, read_inside, remove_inside
from .locks import RootBusyError, exclusive, let_go, open_lock, try_lock
from .metadata import read_attributes
from .partition_facts import MAX_TABLE_NBYTES
from .partition_files import PartitionPaths
from .record import ACCESS_WORD, RECORD_NBYTES, RECORD_WORDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

_LOG = logging.getLogger(__name__)
LOCK_NAME = ".hct.lock"
OPEN_PATIENCE_S = 10.0  # an opening waits as long for the root's lock,
GROW_PATIENCE_S = 2.0  # a put that needs a slab,
_KEEP_PATIENCE_S = 0.5  # and housekeeping
_DEMAND_NAME = ".hct.demand"
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
PARTITION_NAME = re.compile(r"((?:[a-z]+\d+of\d+)(?:-[a-z]+\d+of\d+)*)-w(\d+)")
_SLAB_NAME = re.compile(r"c\.(0|[1-9]\d*)((?:\.0){1,8})(\.tmp)?", re.ASCII)
_TABLE_NAME = re.compile(r"c\.(0|[1-9]\d*)\.0(\.tmp)?", re.ASCII)
_RESERVE_NBYTES = 1 << 30
_ASKING_NS = 1_500_000_000  # how long a writer counts as asking after it was refused
_LEFTOVER = -1  # colder than any slab


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
class Use:
    """Files of a partition that go together, first to last: a slab and its table, or a leftover."""

    paths: PartitionPaths
    files: tuple[Path, ...]
    nbytes: int
    table: Path | None

    def heat(self) -> int:
        """When a page of it was last used."""
        return _LEFTOVER if self.table is None else _newest_access(self.table)


def uses_of(paths: PartitionPaths) -> list[Use]:
    """Plain files of a partition that have the exact names of slabs and tables, finished or not.

    What a writer that was killed while it grew has left is among them. Anything else is foreign.
    """
    slabs = _plain_files(paths.pages, _SLAB_NAME)
    axes = _page_axes(paths) or _commonest(len(match[2]) // 2 for match, _ in slabs)
    found: list[Use] = []
    tables: dict[int, tuple[Path, int]] = {}
    for match, nbytes in _plain_files(paths.slots, _TABLE_NAME):
        if match[2]:
            found.append(Use(paths, (paths.slots / match[0],), nbytes, None))
        else:
            tables[int(match[1])] = (paths.slots / match[0], nbytes)
    for match, nbytes in slabs:
        slab = paths.pages / match[0]
        if len(match[2]) // 2 != axes:
            continue
        table = None if match[3] else tables.pop(int(match[1]), None)
        if table is None:
            found.append(Use(paths, (slab,), nbytes, None))
        else:
            found.append(Use(paths, (slab, table[0]), nbytes + table[1], table[0]))
    return found + [Use(paths, (table,), nbytes, None) for table, nbytes in tables.values()]


def _plain_files(folder: Path, name: re.Pattern[str]) -> list[tuple[re.Match[str], int]]:
    found: list[tuple[re.Match[str], int]] = []
    if folder.is_symlink():
        return found
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            match = name.fullmatch(entry.name)
            with suppress(FileNotFoundError):  # its live writer has just given it up
                if match and entry.is_file(follow_symlinks=False):
                    found.append((match, entry.stat(follow_symlinks=False).st_size))
    return sorted(found, key=lambda file: -int(file[0][1]))  # of slabs as cold the last goes first


def _page_axes(paths: PartitionPaths) -> int:
    try:
        return int(read_attributes(paths.root, PARTITION_FILE)["page_axes"])
    except (StoreError, KeyError, TypeError, ValueError):
        return 0


def _commonest(numbers: Iterable[int]) -> int:
    return next((number for number, _ in Counter(numbers).most_common(1)), 0)


class RootBudget:
    """Bytes of a root against its cap.

    Parameters
    ----------
    root : Path
    capacity_nbytes : int
    access : Access
        Of what is made in the root.
    """

    def __init__(self, root: Path, capacity_nbytes: int, access: Access = Access.PRIVATE) -> None:
        self.root = root
        self.capacity_nbytes = capacity_nbytes
        self.access = access
        self._demand_seen = self._demand_time()
        self._told: set[Path] = set()

    def lock(self, patience_s: float | None = None) -> AbstractContextManager[None]:
        """Hold the root's lock: creation, growth and removal of slabs happen under it.

        Raises
        ------
        RootBusyError
            Where another process keeps it for longer than `patience_s` seconds, 10 where none are given.
        """
        patience_s = OPEN_PATIENCE_S if patience_s is None else patience_s
        return exclusive(self.root / LOCK_NAME, patience_s, self.access)

    def used_nbytes(self) -> int:
        """Bytes of all slabs and tables under the root, live or left behind."""
        return sum(_total(paths) for paths in partition_paths(self.root))

    def room_for(self, nbytes: int, own: PartitionPaths) -> str:
        """Make room for one slab; return "" or why there is none. The lock must be held."""
        stat = os.statvfs(self.root)
        reserve = min(_RESERVE_NBYTES, stat.f_blocks * stat.f_frsize // 100)
        while True:
            over = self.used_nbytes() + nbytes - self.capacity_nbytes
            free = os.statvfs(self.root)
            short = nbytes + reserve - free.f_bavail * free.f_frsize
            if over <= 0 and short <= 0:
                return ""
            if not self.reclaim(own, max(over, short)):
                return "capacity" if over > 0 else "disk_full"

    def reclaim(self, own: PartitionPaths, nbytes: int) -> int:
        """Remove coldest slabs of partitions that no live writer holds, of `nbytes` in all if there are.

        What killed writers left unfinished goes first, all of it. What cannot be removed is named in the log
        and passed over. The lock must be held.

        Returns
        -------
        int
            Bytes removed.
        """
        dead = [paths for paths in partition_paths(self.root) if paths != own and _is_dead(paths)]
        uses = [
            (use.heat(), at, use) for at, use in enumerate(use for paths in dead for use in uses_of(paths))
        ]
        removed = 0
        for heat, _, use in sorted(uses):
            if removed >= nbytes and heat != _LEFTOVER:
                break
            with writer_lock(use.paths) as still_dead:
                if not still_dead:
                    continue
                try:
                    for path in use.files:
                        remove_inside(path, ARRAY_FILE)
                except OSError as error:
                    if use.files[0] not in self._told:
                        self._told.add(use.files[0])
                        _LOG.warning("%s cannot be removed: %s", use.files[0], error.strerror)
                else:
                    removed += use.nbytes
        return removed

    def must_wait(self, own: PartitionPaths) -> bool:
        """Whether a live writer that holds less asks for room. The lock must be held."""
        now = time.time_ns()
        asking = [paths for paths in partition_paths(self.root) if paths != own and _asks(paths, now)]
        if not asking:
            return False
        mine = _total(own)
        return any(_total(paths) < mine and not _is_dead(paths) for paths in asking)

    def ask_for_room(self, nbytes: int, own: PartitionPaths) -> bool:
        """Ask live writers above their fair share to give up a slab, unless that would put this one above.

        The lock must be held. Returns whether they were asked.
        """
        mine = _total(own)
        if mine and mine + nbytes > self._fair_share(own):
            return False
        now = time.time_ns()
        path = self.root / _DEMAND_NAME
        fd = open_lock(path, ROOT_FILE, create=self.access)
        try:
            _touch(fd, now)
        finally:
            let_go(fd)
        _touch(own.lock, now)
        return True

    def excess(self, own: PartitionPaths) -> bool:
        """Whether a writer asks for room and this one holds more than its fair share."""
        stamp = self._demand_time()
        if stamp == self._demand_seen:
            return False
        seen, self._demand_seen = self._demand_seen, stamp
        try:
            with self.lock(_KEEP_PATIENCE_S):
                return _total(own) > self._fair_share(own)
        except RootBusyError:
            self._demand_seen = seen  # to be looked at again
            return False

    def demand_met(self) -> None:
        """Take what was asked for up to now as given."""
        self._demand_seen = self._demand_time()

    def _fair_share(self, own: PartitionPaths) -> int:
        return self.capacity_nbytes // self.live_writers(own)

    def live_writers(self, own: PartitionPaths) -> int:
        """Count the writers that share the cap, this one included. The lock must be held."""
        return 1 + sum(paths != own and not _is_dead(paths) for paths in partition_paths(self.root))

    def excess_nbytes(self) -> int:
        """Bytes that the root holds above the cap (it was lowered); 0 or less where it is within."""
        return self.used_nbytes() - self.capacity_nbytes

    def _demand_time(self) -> int:
        try:
            return (self.root / _DEMAND_NAME).stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return 0


def _total(paths: PartitionPaths) -> int:
    return sum(use.nbytes for use in uses_of(paths))


def _asks(paths: PartitionPaths, now_ns: int) -> bool:
    try:
        return 0 <= now_ns - paths.lock.lstat().st_mtime_ns < _ASKING_NS
    except OSError:
        return False


def _touch(file: int | Path, now_ns: int) -> None:
    """Set a file's times; a file of another user takes the time that it is."""
    try:
        os.utime(file, ns=(now_ns, now_ns))
    except PermissionError:
        os.utime(file)


def settle_demand(fd: int) -> None:
    """Let a writer's lock file, just made or taken over, not look as if the writer asked for room."""
    past = time.time_ns() - 2 * _ASKING_NS
    with suppress(OSError):
        os.utime(fd, ns=(past, past))


@contextmanager
def writer_lock(paths: PartitionPaths) -> Iterator[bool]:
    """Try to hold a partition's writer lock; yields False where a live writer has it."""
    try:
        fd = open_lock(paths.lock, ARRAY_FILE)
    except OSError:
        yield False
        return
    try:
        try:
            taken = try_lock(fd)
        except OSError:
            taken = False
        yield taken
    finally:
        let_go(fd)


def _is_dead(paths: PartitionPaths) -> bool:
    with writer_lock(paths) as dead:
        return dead


def _newest_access(table: Path) -> int:
    try:
        raw = read_inside(table, ARRAY_FILE, MAX_TABLE_NBYTES)
    except OSError:
        return 0
    words = np.frombuffer(raw[: len(raw) // RECORD_NBYTES * RECORD_NBYTES], np.uint64)
    return int(words.reshape(-1, RECORD_WORDS)[:, ACCESS_WORD].max(initial=0))
