"""The page cache: put out of the way, seen to be out of the way, and said."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

# include/uapi/linux/fs.h: wait for what is under way, start the rest, wait for that
_WRITE_OUT = 1 | 2 | 4
MOST_RESIDENT = 0.02  # a page or two that read-ahead or another process holds does not make a figure warm


class Cache(StrEnum):
    """What the page cache has to do with a figure.

    `bypassed`: O_DIRECT. `dropped`: each turn begins with none of the files in memory, and the clock of
    writes stops when the device has the bytes. `warm`: neither; such figures are of memory.
    """

    BYPASSED = "bypassed"
    DROPPED = "dropped"
    WARM = "warm"


def ways(root: Path, modes: Sequence[str], *, allow_cached: bool) -> list[tuple[str, Cache]]:
    """Return how each mode is measured in `root`: cold, and warm too where that was asked for.

    Raises
    ------
    BenchError
        Where a mode can only be measured warm there and nobody asked for it.
    """
    found = []
    for mode in modes:
        if mode == "direct":
            found.append((mode, Cache.BYPASSED))
            continue
        why = why_not_cold(root)
        if not why:
            found.append((mode, Cache.DROPPED))
        elif not allow_cached:
            raise BenchError(
                f"{root} cannot be measured in mode {mode} without the page cache: {why}. Such figures would "
                "be of memory; ask for them with --allow-cached, or choose --mode direct or another --root."
            )
        if allow_cached:
            found.append((mode, Cache.WARM))
    return found


def why_not_cold(root: Path) -> str:
    """Try to write a file in `root` and drop it from the page cache; return "" or why that does not work."""
    path = root / f".hct-cold-{os.getpid()}"
    try:
        path.write_bytes(os.urandom(1 << 20))
        drop([path])
    except BenchError as error:
        return str(error)
    except OSError as error:
        return f"a file cannot be written and dropped: {error.strerror}"
    finally:
        path.unlink(missing_ok=True)
    return ""


def write_out(paths: Iterable[Path]) -> None:
    """Return when the device has the files' bytes, as it has after a write with O_DIRECT."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if _libc().sync_file_range(fd, 0, 0, _WRITE_OUT):
                code = ctypes.get_errno()
                if code not in {errno.ENOSYS, errno.EINVAL, errno.ESPIPE}:
                    raise OSError(code, os.strerror(code), str(path))
                os.fdatasync(fd)
        finally:
            os.close(fd)


def drop(paths: Sequence[Path]) -> None:
    """Write files out and take them out of the page cache.

    Raises
    ------
    BenchError
        Where they are in memory afterwards all the same.
    """
    write_out(paths)
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    share = resident_share(paths)
    if share > MOST_RESIDENT:
        raise BenchError(f"{share:.0%} of the files are still in memory after the page cache was dropped")


def settle(folder: Path) -> None:
    """Have a file system finish what is under way, so that nobody is timed with what others left behind."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc().syncfs(fd):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(folder))
    finally:
        os.close(fd)


def resident_share(paths: Sequence[Path]) -> float:
    """Return which share of the files' bytes the page cache holds, by `mincore`."""
    resident = total = 0
    for path in paths:
        with path.open("r+b") as file:
            nbytes = os.fstat(file.fileno()).st_size
            if not nbytes:
                continue
            with mmap.mmap(file.fileno(), nbytes) as view:
                address = ctypes.c_char.from_buffer(view)
                pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
                failed = _libc().mincore(ctypes.byref(address), nbytes, pages.ctypes.data)
                code = ctypes.get_errno()
                del address
            if failed:
                raise OSError(code, os.strerror(code), str(path))
        resident += int((pages & 1).sum())
        total += len(pages)
    return resident / total if total else 0.0


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return libc
