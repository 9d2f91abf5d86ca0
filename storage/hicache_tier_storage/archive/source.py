"""Where an archive is read from: a folder, a zip file, or an object store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from .errors import ArchiveError, NotAnArchiveError
from .places import Kind, Place, fault_text, object_store
from .zip_reader import data_offset, read_directory

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class UnreadableError(Exception):
    """A file of an archive is missing, cut, or cannot be read."""


class Source(Protocol):
    """Files of an archive by name, for several threads. Names are made from checked parts only."""

    def size(self, name: str) -> int:
        """Bytes of a file; `UnreadableError` where there is none."""

    def read(self, name: str, offset: int, into: NDArray[Any]) -> None:
        """Fill a buffer of uint8 from a file; `UnreadableError` where it is too short."""

    def close(self) -> None:
        """Let go of what is open."""


def open_source(place: Place) -> Source:
    """Open a place to read an archive from.

    Raises
    ------
    NotAnArchiveError, ArchiveError
        Where there is nothing, or nothing that can be read.
    """
    if place.kind is Kind.OBJECTS:
        return ObjectSource(place)
    if place.path.is_dir():
        return FolderSource(place.path)
    if place.path.is_file():
        return ZipSource(place.path)
    raise NotAnArchiveError(f"{place.text} does not exist.")


class FolderSource:
    """A folder. Symbolic links within it are not followed: what they lead to is not in the archive."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._plain: set[str] = {""}  # folders that are no links

    def _open(self, name: str) -> int:
        folder = name.rpartition("/")[0]
        if folder not in self._plain:
            self._check(folder)
        try:
            return os.open(f"{self._path}/{name}", _FLAGS)
        except OSError as error:
            raise UnreadableError(f"{name}: {error.strerror}") from error

    def _check(self, folder: str) -> None:
        outer = folder.rpartition("/")[0]
        if outer not in self._plain:
            self._check(outer)
        if (self._path / folder).is_symlink():
            raise UnreadableError(f"{folder} is a symbolic link")
        self._plain.add(folder)

    def size(self, name: str) -> int:
        """Bytes of a file."""
        fd = self._open(name)
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def read(self, name: str, offset: int, into: NDArray[Any]) -> None:
        """Fill a buffer."""
        fd = self._open(name)
        try:
            _fill(fd, offset, into, name)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Nothing stays open."""


class ZipSource:
    """A zip file with stored members."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ArchiveError(f"{path} cannot be opened: {error.strerror}.") from error
        try:
            self._members = read_directory(self._fd, path)
        except BaseException:
            os.close(self._fd)
            raise
        self._starts: dict[str, int] = {}

    def size(self, name: str) -> int:
        """Bytes of a member."""
        member = self._members.get(name)
        if member is None:
            raise UnreadableError(f"{name}: no such member")
        return member.nbytes

    def read(self, name: str, offset: int, into: NDArray[Any]) -> None:
        """Fill a buffer."""
        if offset + len(into) > self.size(name):
            raise UnreadableError(f"{name} is too short")
        start = self._starts.get(name)
        if start is None:
            try:
                start = self._starts[name] = data_offset(self._fd, self._members[name], self._path)
            except ArchiveError as error:
                raise UnreadableError(str(error)) from error
        _fill(self._fd, start + offset, into, name)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class ObjectSource:
    """A prefix of an object store."""

    def __init__(self, place: Place) -> None:
        self._store = object_store(place, create=False)
        from obstore.exceptions import BaseError

        self._faults = (OSError, BaseError)

    def size(self, name: str) -> int:
        """Bytes of an object."""
        try:
            return int(self._store.head(name)["size"])
        except self._faults as error:
            raise UnreadableError(f"{name}: {fault_text(error)}") from error

    def read(self, name: str, offset: int, into: NDArray[Any]) -> None:
        """Fill a buffer by one ranged request."""
        if not len(into):
            return
        try:
            part = memoryview(self._store.get_range(name, start=offset, length=len(into)))
        except self._faults as error:
            raise UnreadableError(f"{name}: {fault_text(error)}") from error
        if len(part) != len(into):
            raise UnreadableError(f"{name} is too short")
        into.data[:] = part

    def close(self) -> None:
        """Nothing stays open."""


def _fill(fd: int, offset: int, into: NDArray[Any], name: str) -> None:
    view, done = into.data.cast("B"), 0
    while done < len(view):
        try:
            part = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise UnreadableError(f"{name}: {error.strerror}") from error
        if not part:
            raise UnreadableError(f"{name} is too short")
        done += part
