"""An archive in the making in an object store."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .destination import JOB, clear, is_manifest, refuse_foreign
from .documents import MANIFEST, STATE
from .errors import ArchiveError, ArchiveExistsError
from .places import fault_text, object_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .places import Place

_OWNER = f"{STATE}/owner"


class ObjectPrefix:
    """What lies below a prefix of an object store; nothing is changed.

    Parameters
    ----------
    place : Place
    create : bool
        Make the folder of a `file://` URL where there is none.
    """

    def __init__(self, place: Place, *, create: bool = False) -> None:
        self._store = object_store(place, create=create)
        self._place = place

    def refuse_existing(self, *, overwrite: bool) -> bool:
        """Refuse what an export may not replace; return whether there is an archive to be replaced.

        Raises
        ------
        ArchiveExistsError
            With `overwrite` too where what is there is no archive.
        """
        place, raw = self._place, self.get(MANIFEST)
        others = [name for name in self.sizes("") if not name.startswith(f"{STATE}/")]
        if raw is None:
            if others and self.get(JOB) is None:
                raise ArchiveExistsError(f"{place.text} holds {len(others)} objects that are no archive.")
            return False
        if not is_manifest(raw):
            raise ArchiveExistsError(f"{place.text} exists and is no archive; it is not overwritten.")
        if not overwrite:
            raise ArchiveExistsError(f"{place.text} exists; --overwrite replaces it.")
        refuse_foreign(place, others)
        return True

    def get(self, name: str) -> bytes | None:
        """Return an object's bytes, or None where there is none."""
        with self._told(name):
            try:
                return bytes(self._store.get(name).bytes())
            except FileNotFoundError:
                return None

    def sizes(self, prefix: str) -> dict[str, int]:
        """Sizes of the objects below a prefix, without the one that says whose export it is."""
        start = f"{prefix}/" if prefix else ""
        with self._told(prefix):
            return {
                meta["path"].removeprefix(start): meta["size"]
                for batch in self._store.list(prefix or None)
                for meta in batch
                if meta["path"] != _OWNER
            }

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Say what a fault of the store was about."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError) as error:
            if isinstance(error, ArchiveError):
                raise
            where = f"{self._place.text}, {name}" if name else self._place.text
            raise ArchiveError(f"{where}: {fault_text(error)}") from error


class ObjectDestination(ObjectPrefix):
    """A prefix of an object store. An archive there is finished once its manifest is there.

    There are no locks: of two exports to one prefix the one that began last goes on, and the other ends.

    Parameters
    ----------
    place : Place
    overwrite : bool
    """

    def __init__(self, place: Place, *, overwrite: bool) -> None:
        super().__init__(place, create=True)
        if self.refuse_existing(overwrite=overwrite):
            self.remove([MANIFEST])  # from here on it is no archive for anybody
            clear(self)
        self._name = secrets.token_bytes(16)
        self.put(_OWNER, self._name)
        self.scratch = Path(tempfile.mkdtemp(prefix="hct-export-"))

    def put(self, name: str, data: bytes) -> None:
        """Write an object."""
        with self._told(name):
            self._store.put(name, data)

    def publish(self, path: Path, name: str) -> None:
        """Upload a draft."""
        self._check_owner()
        with self._told(name):
            self._store.put(name, path)
        path.unlink()

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects."""
        for name in names:
            with self._told(name), suppress(FileNotFoundError):
                self._store.delete(name)

    def finish(self, manifest: bytes) -> None:
        """Write the manifest; what only a resumed export needs goes."""
        self._check_owner()
        self.put(MANIFEST, manifest)
        self.remove([*(f"{STATE}/{name}" for name in self.sizes(STATE)), _OWNER])
        shutil.rmtree(self.scratch, ignore_errors=True)

    def abandon(self) -> None:
        """Remove the local drafts."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _check_owner(self) -> None:
        if self.get(_OWNER) != self._name:
            raise ArchiveExistsError(f"another process has begun to export to {self._place.text}.")
