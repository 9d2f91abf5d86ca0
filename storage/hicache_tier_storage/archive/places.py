"""Where archives lie: a folder, a zip file, or a prefix of an object store."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from hicache_tier.errors import EngineUnavailableError, InvalidArgumentError, how_to_get

from .errors import ArchiveError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


class Kind(Enum):
    """Kinds of place."""

    FOLDER = "folder"
    ZIP = "zip"
    OBJECTS = "objects"


@dataclass(frozen=True, slots=True)
class Place:
    """A place that a user named.

    Attributes
    ----------
    kind : Kind
    text : str
        As it was named, without a query or password, which are secrets.
    path : Path
        Of a folder, a zip or a file URL; empty for other objects.
    url : str
        Of an object store.
    """

    kind: Kind
    text: str
    path: Path
    url: str = ""

    @classmethod
    def parse(cls, value: object) -> Place:
        """Take a path, one that ends in `.zip`, or a URL (`s3://`, `gs://`, `az://`, `file://`, ...)."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
            raise InvalidArgumentError(f"an archive is a path or a URL, got {value!r}.")
        text = str(value)
        if isinstance(value, str) and _URL.match(text):
            return cls._of_url(text)
        path = Path(text).absolute()
        if path.name in {"", ".."}:
            raise InvalidArgumentError(f"an archive needs a name of its own, got {text!r}.")
        try:
            path = path.parent.resolve() / path.name  # what `..` leads to is the same however it is written
        except (OSError, RuntimeError) as error:
            raise ArchiveError(f"{text} cannot be found: {error}") from error
        return cls(Kind.ZIP if path.suffix.lower() == ".zip" else Kind.FOLDER, text, path)

    @classmethod
    def _of_url(cls, url: str) -> Place:
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise InvalidArgumentError(f"{url!r} is no URL: {error}.") from error
        user, at, host = parts.netloc.rpartition("@")
        shown = parts._replace(netloc=user.partition(":")[0] + at + host, query="", fragment="").geturl()
        if parts.scheme != "file":
            return cls(Kind.OBJECTS, shown, Path(), url)
        if parts.netloc not in {"", "localhost"} or not parts.path.strip("/"):
            raise InvalidArgumentError(f"a file URL is file:///path/of/an/archive, got {shown!r}.")
        return cls(Kind.OBJECTS, shown, Path(unquote(parts.path)).resolve(), url)


def check_parent(path: Path) -> None:
    """Refuse a path that nothing can be made at: the folder it would be made in is none, or not writable.

    Raises
    ------
    ArchiveError
        Naming that folder.
    """
    above = next(folder for folder in path.parents if folder.exists() or folder.is_symlink())
    if not above.is_dir():
        raise ArchiveError(f"{path} cannot be made: {above} is no folder.")
    if not path.exists() and not os.access(above, os.W_OK | os.X_OK):
        raise ArchiveError(f"{path} cannot be made: {above} is not writable.")


def fault_text(error: BaseException) -> str:
    """Return what a fault of obstore says to people: not the dump of its inner error that follows."""
    return " ".join(str(error).partition("Debug source:")[0].split())


def object_store(place: Place, *, create: bool) -> Any:  # noqa: ANN401 - obstore's union of stores
    """Open an object store by its URL; credentials come from the environment, as obstore documents.

    Raises
    ------
    EngineUnavailableError
        Where obstore is not installed.
    ArchiveError
        Where the URL is not understood.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url
    except ImportError as error:
        raise EngineUnavailableError(f"{place.text} needs {error.name}: {how_to_get('objects')}.") from error
    try:
        if place.path.name:
            return LocalStore(place.path, mkdir=create, automatic_cleanup=create)
        return from_url(place.url)
    except (BaseError, ValueError, OSError) as error:
        raise ArchiveError(f"{place.text} cannot be opened: {fault_text(error)}") from error
