"""Opening what lies in a store, through no symbolic link below its root.

What lies behind a link is not in the root. Looking first and opening afterwards would leave a moment between;
so each folder from the root on is opened by itself, and nothing that is a link. Nor is a pipe waited for.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROOT_FILE: Final = 1
NAMESPACE_FILE: Final = 2
RANK_FILE: Final = 3
PARTITION_FILE: Final = 4
ARRAY_FILE: Final = 5
"""Names of a path that lie below the store's root, for a file of each kind."""

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class NotPlainError(OSError):
    """What bears a file's name is a link, no plain file, or larger than such a file can be."""


@contextmanager
def folder_of(path: Path, depth: int) -> Iterator[int]:
    """Open the folder of a file whose last `depth` names lie below the store's root.

    Raises
    ------
    NotPlainError
        Where one of the folders is a symbolic link.
    OSError
        As of `os.open`.
    """
    fd = os.open(path.parents[depth - 1], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in path.parts[-depth:-1]:
            inner = _enter(name, fd, path)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def _enter(name: str, folder: int, path: Path) -> int:
    try:
        return os.open(name, os.O_RDONLY | _FOLDER, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and _is_link(name, folder)):
            raise NotPlainError(errno.ELOOP, "a symbolic link leads there", str(path)) from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def _is_link(name: str, folder: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def open_inside(path: Path, depth: int, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open a file whose last `depth` names lie below the store's root; return its descriptor.

    Raises
    ------
    NotPlainError
        Where one of the names is a symbolic link.
    OSError
        As of `os.open`.
    """
    with folder_of(path, depth) as folder:
        try:
            fd = os.open(path.name, flags | _FILE, mode, dir_fd=folder)
        except OSError as error:
            kind = NotPlainError if error.errno == errno.ELOOP else OSError
            raise kind(error.errno, error.strerror, str(path)) from error
    os.set_blocking(fd, True)  # io_uring gives up at once on files that are not
    return fd


def read_inside(path: Path, depth: int, most: int) -> bytes:
    """Read a plain file of at most `most` bytes.

    Raises
    ------
    NotPlainError
        Where there is a link, something else than a plain file, or a larger file.
    OSError
        As of `os.open`.
    """
    fd = open_inside(path, depth)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise NotPlainError(errno.EINVAL, "it is no plain file", str(path))
        if found.st_size > most:
            raise NotPlainError(errno.EFBIG, f"{found.st_size} bytes are more than it can have", str(path))
        parts, left = [], found.st_size
        while left:
            part = os.read(fd, left)
            if not part:
                break
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def remove_inside(path: Path, depth: int) -> None:
    """Remove a file, or a link in its place; one that is not there is no fault."""
    with suppress(FileNotFoundError), folder_of(path, depth) as folder:
        os.unlink(path.name, dir_fd=folder)
