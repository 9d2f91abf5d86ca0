"""File locks that neither a forked child nor a process that stands still can keep for ever.

A child of fork shares its parent's locks, and would hold them for as long as it lives: a lock is released
before its descriptor is closed, and a child closes its copies at once.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_tier.errors import StoreError

from .inside import ROOT_FILE, open_inside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .access import Access

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.0005, 0.01
_guard = threading.RLock()  # held over a fork, so that no descriptor is between being opened and listed
_held: set[int] = set()


class RootBusyError(StoreError):
    """Another process kept a root's lock for too long."""

    kind = "root_busy"


def open_lock(path: Path, depth: int, *, create: Access | None = None, writable: bool = True) -> int:
    """Open a file to lock it, made with that access where it is missing; `depth` as of `inside.open_inside`.

    Give the descriptor back by `let_go`, never by `os.close`.
    """
    flags = os.O_RDWR if writable else os.O_RDONLY
    with _guard:
        fd = open_inside(path, depth, flags) if create is None else _make(path, depth, flags, create)
        _held.add(fd)
    return fd


def _make(path: Path, depth: int, flags: int, access: Access) -> int:
    """Open a file, made where it is missing: its permissions are set by whoever made it."""
    while True:
        with suppress(FileExistsError):
            fd = open_inside(path, depth, flags | os.O_CREAT | os.O_EXCL, access.file_mode)
            access.settle(fd)
            return fd
        with suppress(FileNotFoundError):
            return open_inside(path, depth, flags)


def let_go(fd: int) -> None:
    """Release and close. In a child of fork, which has closed its copy already, nothing is done."""
    with _guard:
        if fd in _held:
            _held.discard(fd)
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock without waiting; False where another holds it.

    Raises
    ------
    OSError
        Where the file system knows no such locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hold_folder(folder: Path, depth: int) -> int | None:
    """Lock a folder, which stays locked whatever is removed from it; None where another holds it.

    Give the descriptor back by `let_go`. It is -1, and the folder not locked, where the file system does not
    lock folders.
    """
    fd = open_lock(folder, depth, writable=False)
    try:
        if try_lock(fd):
            return fd
    except OSError:
        let_go(fd)
        return -1
    let_go(fd)
    return None


def wait_for_lock(fd: int, patience_s: float, *, shared: bool = False) -> bool:
    """Lock, waiting up to `patience_s` seconds; False where another held it all the while."""
    deadline, pause = time.monotonic() + patience_s, _FIRST_WAIT_S
    while not try_lock(fd, shared=shared):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_WAIT_S)
    return True


@contextmanager
def exclusive(path: Path, patience_s: float, access: Access) -> Iterator[None]:
    """Hold the lock file of a root, made where it is missing.

    Raises
    ------
    RootBusyError
        Where another process held it for all of `patience_s` seconds.
    """
    fd = open_lock(path, ROOT_FILE, create=access)
    try:
        if not wait_for_lock(fd, patience_s):
            raise RootBusyError(
                f"{path} has been locked by {_holder(fd)} for {patience_s:g} s; "
                "a process that stands still inside a store must go on or end first."
            )
        yield
    finally:
        let_go(fd)


def _holder(fd: int) -> str:
    """Who holds a lock, as far as the kernel tells."""
    inode = str(os.fstat(fd).st_ino)
    with suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            fields = line.split()
            if "FLOCK" in fields and "->" not in fields and fields[5].rpartition(":")[2] == inode:
                return f"process {fields[4]}"
    return "another process"


def _close_parents_locks() -> None:
    for fd in _held:
        with suppress(OSError):
            os.close(fd)
    _held.clear()
    _guard.release()


os.register_at_fork(
    before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_parents_locks
)
