"""What lies under a root, by name: namespaces, partitions, and entries that are not the store's."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_tier.errors import FormatVersionError, StoreError

from .capacity import PARTITION_NAME
from .inside import NAMESPACE_FILE
from .metadata import read_attributes
from .partition_files import PartitionPaths
from .root_check import check_root

if TYPE_CHECKING:
    import os

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_POOL = re.compile(r"[A-Za-z0-9_]{1,32}")
_GROUP = re.compile(r"zarr\.json")
_ROOT_FILE = re.compile(r"\.hct[.-].+")
_FILES = {
    "pages": re.compile(r"zarr\.json|c\.\d+(\.0)+"),
    "slots": re.compile(r"zarr\.json|c\.\d+\.0"),
    "state": re.compile(r"zarr\.json|c\.0|writer\.lock|journal"),
}


@dataclass(slots=True)
class Namespace:
    """One namespace folder.

    Attributes
    ----------
    name : str
        32 hex digits.
    identity : dict
        `attributes.hicache_tier` of its group; empty where that is damaged.
    problem : str
        Why the identity cannot be read, or nothing.
    partitions : list of PartitionPaths
        In the order of their names.
    """

    name: str
    identity: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    partitions: list[PartitionPaths] = field(default_factory=list)


@dataclass(slots=True)
class Survey:
    """Namespaces of a root, and paths relative to it of everything that the store did not make."""

    root: Path
    namespaces: list[Namespace] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    @property
    def partitions(self) -> list[PartitionPaths]:
        """All partitions of all namespaces."""
        return [paths for space in self.namespaces for paths in space.partitions]

    def relative(self, path: Path) -> str:
        """Path as a person reads it, from the root on."""
        return str(path.relative_to(self.root))


def survey(root: str | os.PathLike[str]) -> Survey:
    """Walk the folders of a store; reads no slot table and writes nothing.

    Raises
    ------
    NotAStoreError
        Where `root` holds no store.
    FormatVersionError
        Where a namespace is of a later version of the format; names both.
    StoreError
        Where a folder cannot be read.
    """
    path = Path(root).absolute()
    check_root(path, create=False)
    found = Survey(path)
    try:
        for space in _walk(found, path, _ROOT_FILE, _NAMESPACE):
            _add_namespace(found, space)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"{error.filename or path} cannot be read: {error.strerror}.") from error
    found.foreign.sort()
    return found


def _add_namespace(found: Survey, path: Path) -> None:
    space = Namespace(path.name)
    try:
        space.identity = read_attributes(path, NAMESPACE_FILE)
    except FormatVersionError:
        raise
    except StoreError as error:
        space.problem = str(error)
    foreign = len(found.foreign)
    for rank in _walk(found, path, _GROUP, PARTITION_NAME):
        for pool in _walk(found, rank, _GROUP, _POOL):
            _note_foreign(found, pool)
            space.partitions.append(PartitionPaths(pool))
    if space.problem and not space.partitions:
        del found.foreign[foreign:]
        found.foreign.append(found.relative(path))
        return
    found.namespaces.append(space)


def _note_foreign(found: Survey, pool: Path) -> None:
    for folder in _walk(found, pool, _GROUP, re.compile("|".join(_FILES))):
        _walk(found, folder, _FILES[folder.name], None)


def _walk(found: Survey, folder: Path, files: re.Pattern[str], folders: re.Pattern[str] | None) -> list[Path]:
    """Return the subfolders of one folder that carry a name of the format; note what is foreign."""
    known: list[Path] = []
    try:
        entries = sorted(folder.iterdir())
    except FileNotFoundError:  # a live store gave it up meanwhile
        return known
    for entry in entries:
        link = entry.is_symlink()
        if not link and entry.is_dir():
            if folders and folders.fullmatch(entry.name):
                known.append(entry)
                continue
            foreign = not (folder == found.root and entry.name == "lost+found")
        else:
            foreign = link or not files.fullmatch(entry.name.removesuffix(".tmp"))  # a kill leaves .tmp
        if foreign:
            found.foreign.append(found.relative(entry))
    return known
