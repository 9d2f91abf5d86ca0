"""Where an export writes: a folder beside its destination, or an object store; the manifest goes last."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import zipfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from hicache_tier_storage.access import Access
from hicache_tier_storage.inside import read_inside
from hicache_tier_storage.metadata import sync_directory

from .documents import ARCHIVE_FORMAT
from .errors import ArchiveError, ArchiveExistsError
from .places import Kind, Place

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MANIFEST = "zarr.json"
STATE = ".hct-export"  # what a resumed export needs to know; gone from a finished archive
JOB = f"{STATE}/job.json"
_MAXJOB_NBYTES = 1 << 20
_MAX_STATE_NBYTES = 256 << 20


class Destination(Protocol):
    """Files of an archive in the making, by name; a name appears whole or not at all."""

    @property
    def scratch(self) -> Path:
        """Local folder for drafts; `publish` takes files from there."""

    def get(self, name: str) -> bytes | None:
        """Return a file's bytes, or None where there is none."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file."""

    def publish(self, path: Path, name: str) -> None:
        """Make a local file of `scratch` part of the archive; it is gone from there."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Sizes of the files of one folder, by their names within it."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; one that is not there is no fault."""

    def finish(self, manifest: bytes) -> None:
        """Write the manifest and make the archive what the user asked for."""

    def abandon(self) -> None:
        """Let go of everything but what a later call resumes from."""


def open_destination(place: Place, job: dict[str, Any], *, overwrite: bool, sync: bool) -> Destination:
    """Begin an archive, or go on with one that the same job has begun.

    Raises
    ------
    ArchiveExistsError
        Where there is something already, and `overwrite` was not asked for or it is no archive.
    ArchiveError
        Where the place cannot be written.
    """
    if place.kind is Kind.OBJECTS:
        from .object_destination import ObjectDestination

        found: Destination = ObjectDestination(place, overwrite=overwrite)
    else:
        found = FolderDestination(place, overwrite=overwrite, sync=sync)
    try:
        _match_job(found, place, job, overwrite=overwrite)
    except BaseException:
        found.abandon()
        raise
    return found


def _match_job(found: Destination, place: Place, job: dict[str, Any], *, overwrite: bool) -> None:
    """Go on with what the same job left; begin anew over another job's only where that was asked for."""
    old = found.get(JOB)
    mine = json.dumps(job, sort_keys=True).encode()
    if old == mine:
        return
    if old is not None:
        if not overwrite:
            raise ArchiveExistsError(
                f"{place.text} is an unfinished export with other options ({_differences(old, job)}). "
                "Use the same options to finish it, or --overwrite to begin anew."
            )
        found.remove([JOB])
        clear(found)
    found.put(JOB, mine)


def _differences(old: bytes, job: dict[str, Any]) -> str:
    try:
        told = json.loads(old)
        return ", ".join(name for name in sorted(job) if told.get(name) != job[name]) or "older version"
    except (ValueError, AttributeError):
        return "damaged"


def clear(found: Destination) -> None:
    """Remove whatever an earlier export has left."""
    found.remove(list(found.sizes("")))


class FolderDestination:
    """A folder, or a zip made from one: all is written to `<name>.partial` and renamed at the end.

    Parameters
    ----------
    place : Place
    overwrite : bool
    sync : bool
        Whether all files are on disk before the archive appears.
    """

    def __init__(self, place: Place, *, overwrite: bool, sync: bool) -> None:
        self._place = place
        self._sync = sync
        self._overwrite = overwrite
        self._path = place.path
        self._work = place.path.with_name(place.path.name + ".partial")
        self._replaces = refuse_existing(place, overwrite=overwrite)
        self.scratch = self._work / STATE / "drafts"
        if self._work.exists() and not (self._work / STATE).is_dir() and any(self._work.iterdir()):
            raise ArchiveExistsError(f"{self._work} is in the way: an export writes there, and it is none.")
        try:
            Access.PRIVATE.make_folder(self._work / STATE)
            self._lock = os.open(self._work / STATE / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ArchiveError(f"{place.text} cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ArchiveExistsError(f"another process is exporting to {place.text}.") from error
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(mode=0o700)

    def get(self, name: str) -> bytes | None:
        """Return a file's bytes, or None where there is none."""
        try:
            return read_inside(self._work / name, name.count("/") + 1, _MAX_STATE_NBYTES)
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        """Write a file."""
        draft = self.scratch / "put"
        with open(draft, "wb", opener=_private) as file:
            file.write(data)
            file.flush()
            if self._sync:
                os.fsync(file.fileno())
        self.publish(draft, name)

    def publish(self, path: Path, name: str) -> None:
        """Rename a draft into place."""
        target = self._work / name
        Access.PRIVATE.make_folder(target.parent)
        path.replace(target)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Sizes of the files of one folder; of the whole archive for the empty prefix."""
        folder = self._work / prefix
        paths = folder.rglob("*") if not prefix else folder.glob("*")
        keep = {self._work / STATE / "lock"}
        return {
            str(path.relative_to(folder)): path.lstat().st_size
            for path in paths
            if path.is_file() and path not in keep
        }

    def remove(self, names: Iterable[str]) -> None:
        """Remove files."""
        for name in names:
            (self._work / name).unlink(missing_ok=True)

    def finish(self, manifest: bytes) -> None:
        """Write the manifest, then let the archive appear under its name."""
        self._replaces = refuse_existing(self._place, overwrite=self._overwrite)  # it may have come meanwhile
        self.put(MANIFEST, manifest)
        if self._sync:
            for folder in (self._work, *(path for path in self._work.rglob("*") if path.is_dir())):
                sync_directory(folder)
        shutil.rmtree(self._work / STATE)
        made = self._work
        if self._place.kind is Kind.ZIP:
            made = pack_zip(self._work, sync=self._sync)
        if self._replaces and self._path.is_dir():
            old = self._path.with_name(self._path.name + ".replaced")
            shutil.rmtree(old, ignore_errors=True)
            self._path.rename(old)
            made.rename(self._path)
            shutil.rmtree(old)
        else:
            made.replace(self._path)
        if self._place.kind is Kind.ZIP:
            shutil.rmtree(self._work)
        if self._sync:
            sync_directory(self._path.parent)
        os.close(self._lock)

    def abandon(self) -> None:
        """Let go of the lock; what was published stays."""
        with suppress(OSError):
            os.close(self._lock)


def refuse_existing(place: Place, *, overwrite: bool) -> bool:
    """Refuse a destination that exists; return whether there is an archive to be replaced.

    Raises
    ------
    ArchiveExistsError
        With `overwrite` too where what is there is no archive.
    """
    path = place.path
    if not path.exists() and not path.is_symlink():
        return False
    empty = path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    if empty and place.kind is Kind.FOLDER:
        return False
    if not overwrite:
        raise ArchiveExistsError(f"{place.text} exists; --overwrite replaces it.")
    if not _is_archive(place):
        raise ArchiveExistsError(f"{place.text} exists and is no archive; it is not overwritten.")
    return True


def _is_archive(place: Place) -> bool:
    """Whether a finished archive lies there, as far as its manifest says."""
    try:
        if place.path.is_symlink():
            return False
        if place.kind is Kind.ZIP:
            with zipfile.ZipFile(place.path) as file, file.open(MANIFEST) as manifest:
                raw = manifest.read(_MAXJOB_NBYTES << 4)
        else:
            with (place.path / MANIFEST).open("rb") as file_:
                raw = file_.read(_MAXJOB_NBYTES << 4)
        return bool(json.loads(raw)["attributes"]["hicache_tier"]["format"] == ARCHIVE_FORMAT)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, zipfile.BadZipFile):
        return False


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner may read, as `open` wants it."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def pack_zip(folder: Path, *, sync: bool) -> Path:
    """Store a folder's files in a zip beside it, uncompressed, the manifest last; return its path."""
    target = folder.with_name(folder.name + ".zip")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    with (
        open(target, "wb", opener=_private) as whole,
        zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED, allowZip64=True) as packed,
    ):
        for path in (*files, folder / MANIFEST):
            info = zipfile.ZipInfo(str(path.relative_to(folder)))
            info.external_attr = 0o600 << 16
            info.file_size = path.stat().st_size
            with path.open("rb") as source, packed.open(info, "w", force_zip64=True) as member:
                shutil.copyfileobj(source, member, 4 << 20)
    if sync:
        with target.open("rb") as file:
            os.fsync(file.fileno())
    return target
