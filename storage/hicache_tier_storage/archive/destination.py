"""Where an export writes: a folder beside its destination, or an object store; the manifest goes last."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import zipfile
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from hicache_tier_storage.access import Access
from hicache_tier_storage.inside import NotPlainError, read_inside
from hicache_tier_storage.metadata import sync_directory

from .documents import ARCHIVE_FORMAT, MANIFEST, STATE, foreign_names
from .errors import ArchiveError, ArchiveExistsError
from .places import Kind, Place, check_parent

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

JOB = f"{STATE}/job.json"
_REPLACED = f"{STATE}/replaced"
_MOST_MANIFEST_NBYTES = 16 << 20
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


def check_destination(place: Place, job: dict[str, Any] | None, *, overwrite: bool) -> None:
    """Refuse what `open_destination` refuses; looks only.

    Parameters
    ----------
    place : Place
    job : dict, optional
        Without one an unfinished export is not looked at.
    overwrite : bool

    Raises
    ------
    ArchiveExistsError, ArchiveError
        As `open_destination`.
    """
    if place.kind is not Kind.OBJECTS:
        work = _work_folder(place)
        _refuse_work(work)
        check_parent(place.path)
        if job is not None and _is_aside(place):  # an export puts it back, and then looks
            place = replace(place, path=work / _REPLACED)
        refuse_existing(place, overwrite=overwrite)
        old = _read(work, JOB)
    elif place.path.name and not place.path.exists():  # of a file URL
        check_parent(place.path)
        return
    else:
        from .object_destination import ObjectPrefix

        prefix = ObjectPrefix(place)
        prefix.refuse_existing(overwrite=overwrite)
        old = prefix.get(JOB)
    if job is not None:
        _goes_on(old, place, job, overwrite=overwrite)


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
    if _goes_on(old, place, job, overwrite=overwrite):
        return
    if old is not None:
        found.remove([JOB])
        clear(found)
    found.put(JOB, _as_bytes(job))


def _goes_on(old: bytes | None, place: Place, job: dict[str, Any], *, overwrite: bool) -> bool:
    """Return whether the same job has begun; another one is refused, unless it is to be begun anew."""
    if old is None or old == _as_bytes(job):
        return old is not None
    if not overwrite:
        raise ArchiveExistsError(
            f"{place.text} is an unfinished export with other options ({_differences(old, job)}). "
            "Use the same options to finish it, or --overwrite to begin anew."
        )
    return False


def _as_bytes(job: dict[str, Any]) -> bytes:
    return json.dumps(job, sort_keys=True).encode()


def _differences(old: bytes, job: dict[str, Any]) -> str:
    try:
        told = json.loads(old)
        return ", ".join(name for name in sorted(job) if told.get(name) != job[name]) or "older version"
    except (ValueError, AttributeError):
        return "damaged"


def clear(found: Destination) -> None:
    """Remove whatever an earlier export has left; what no export writes stays."""
    found.remove([name for name in found.sizes("") if not foreign_names([name])])


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
        self._work = _work_folder(place)
        self._replaced = self._work / _REPLACED
        _refuse_work(self._work)
        if _is_aside(place):
            self._replaced.rename(self._path)
        self._replaces = refuse_existing(place, overwrite=overwrite)
        self.scratch = self._work / STATE / "drafts"
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
        return _read(self._work, name)

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
        """Write the manifest, then let the archive appear under its name.

        A kill at any moment leaves the archive, or what the same export goes on from; and one that is
        replaced is there until then.
        """
        self._replaces = refuse_existing(self._place, overwrite=self._overwrite)  # it may have come meanwhile
        self.put(MANIFEST, manifest)
        if self._sync:
            for folder in (self._work, *(path for path in self._work.rglob("*") if path.is_dir())):
                sync_directory(folder)
        if self._place.kind is Kind.ZIP:
            pack_zip(self._work, self.scratch / "packed", sync=self._sync).replace(self._path)
            for child in self._work.iterdir():
                if child.name != STATE:  # it says whose folder this is: the last to go
                    shutil.rmtree(child) if child.is_dir() else child.unlink()
            shutil.rmtree(self._work)
        else:
            if self._replaces:
                self._path.rename(self._replaced)
            self._work.rename(self._path)
            shutil.rmtree(self._path / STATE)
        if self._sync:
            sync_directory(self._path.parent)
        os.close(self._lock)

    def abandon(self) -> None:
        """Let go of the lock; what was published stays."""
        with suppress(OSError):
            os.close(self._lock)


def _work_folder(place: Place) -> Path:
    return place.path.with_name(place.path.name + ".partial")


def _refuse_work(work: Path) -> None:
    """Refuse what bears the name of the work folder and is no folder of an export, nor an empty one."""
    try:
        ours = stat.S_ISDIR(work.lstat().st_mode) and (_is_export(work) or not any(work.iterdir()))
    except (FileNotFoundError, NotADirectoryError):  # of which `check_parent` tells
        return
    except OSError as error:
        raise ArchiveError(f"{work} cannot be made: {error.strerror}.") from error
    if not ours:
        raise ArchiveExistsError(f"{work} is in the way: an export writes there, and it is none.")


def _is_aside(place: Place) -> bool:
    """Whether an export was killed in the middle of `finish`, the archive to be replaced put aside."""
    return (_work_folder(place) / _REPLACED).exists() and not place.path.exists()


def _is_export(work: Path) -> bool:
    state = work / STATE
    return state.is_dir() and not state.is_symlink()


def _read(folder: Path, name: str) -> bytes | None:
    path = folder / name
    try:
        return read_inside(path, name.count("/") + 1, _MAX_STATE_NBYTES)
    except FileNotFoundError:
        return None
    except NotPlainError as error:
        raise ArchiveExistsError(f"{path} is in the way: {error.strerror}.") from error
    except OSError as error:
        raise ArchiveError(f"{path} cannot be read: {error.strerror}.") from error


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
    if not is_manifest(_read_manifest(place)):
        raise ArchiveExistsError(f"{place.text} exists and is no archive; it is not overwritten.")
    if not overwrite:
        raise ArchiveExistsError(f"{place.text} exists; --overwrite replaces it.")
    if place.kind is Kind.FOLDER:
        refuse_foreign(place, (child.name for child in path.iterdir()))
    return True


def refuse_foreign(place: Place, names: Iterable[str]) -> None:
    """Refuse to replace an archive with which somebody keeps other things."""
    foreign = foreign_names(names)
    if foreign:
        raise ArchiveExistsError(
            f"{place.text} holds what is not the archive's ({', '.join(foreign[:3])}); it is not overwritten."
        )


def _read_manifest(place: Place) -> bytes:
    try:
        if place.path.is_symlink():
            return b""
        if place.kind is Kind.ZIP:
            with zipfile.ZipFile(place.path) as file, file.open(MANIFEST) as manifest:
                return manifest.read(_MOST_MANIFEST_NBYTES)
        with (place.path / MANIFEST).open("rb") as file_:
            return file_.read(_MOST_MANIFEST_NBYTES)
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError, zipfile.BadZipFile):
        return b""


def is_manifest(raw: bytes) -> bool:
    """Whether this is the manifest of an archive, as far as its format says."""
    try:
        return bool(json.loads(raw)["attributes"]["hicache_tier"]["format"] == ARCHIVE_FORMAT)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner may read, as `open` wants it."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def pack_zip(folder: Path, target: Path, *, sync: bool) -> Path:
    """Store the files of an archive in a zip, uncompressed, the manifest last; return its path."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path != folder / MANIFEST and folder / STATE not in path.parents
    )
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
