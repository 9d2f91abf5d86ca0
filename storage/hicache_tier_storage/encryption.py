"""The key that pages are encrypted with, and what is derived from it; FORMAT.md, section 8, is normative."""

from __future__ import annotations

import hmac
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from hicache_tier.errors import EncryptionError, InvalidArgumentError

_LOG = logging.getLogger(__name__)
ALGORITHM: Final = "aes-256-gcm"
KEY_NBYTES: Final = 32
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_MOST_FILE_NBYTES = 4096
_ENVIRONMENT = "env:"
_ADVICE = "a key is 32 bytes, as 64 hex digits: `openssl rand -hex 32` makes one."


def expand(key: bytes, info: bytes, nbytes: int) -> bytes:
    """HKDF-Expand of RFC 5869 with SHA-256: `nbytes` bytes that nobody computes without the key."""
    found = block = b""
    number = 0
    while len(found) < nbytes:
        number += 1
        block = hmac.digest(key, block + info + bytes([number]), "sha256")
        found += block
    return found[:nbytes]


@dataclass(frozen=True, slots=True)
class EncryptionKey:
    """A key of 32 random bytes. It never shows in a representation, a message or a file.

    Attributes
    ----------
    secret : bytes
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.secret, bytes) or len(self.secret) != KEY_NBYTES:
            raise InvalidArgumentError(f"an encryption key of another length or type was given; {_ADVICE}")

    @classmethod
    def parse(cls, value: object) -> EncryptionKey | None:
        """Take a key, the path of a key file, `env:NAME` for an environment variable, or None.

        Raises
        ------
        InvalidArgumentError
            For anything else, and where what is named holds no key; the message shows nothing of it.
        """
        if value is None or isinstance(value, EncryptionKey):
            return value
        if isinstance(value, str) and value.startswith(_ENVIRONMENT):
            return cls.from_environment(value.removeprefix(_ENVIRONMENT))
        if isinstance(value, str | os.PathLike):
            return cls.from_file(value)
        raise InvalidArgumentError(
            f"encryption must be the path of a key file, 'env:NAME' or an EncryptionKey, "
            f"got {type(value).__name__}."
        )

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file of 64 hex digits, or of 32 bytes."""
        where = Path(path)
        try:
            with where.open("rb") as file:
                raw = file.read(_MOST_FILE_NBYTES)
                mode = os.fstat(file.fileno()).st_mode
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidArgumentError(f"key file {where} cannot be read: {reason}.") from error
        if mode & 0o007:
            _LOG.warning(
                "key file %s can be read by every user of this host; chmod 600 keeps it private.", where
            )
        if len(raw) == KEY_NBYTES:
            return cls(raw)
        return cls._from_text(raw.decode("ascii", "replace"), f"key file {where}")

    @classmethod
    def from_environment(cls, name: str) -> Self:
        """Read an environment variable of 64 hex digits."""
        text = os.environ.get(name)
        if text is None:
            raise InvalidArgumentError(f"the environment variable {name!r}, for the key, is not set.")
        return cls._from_text(text, f"the environment variable {name!r}")

    @classmethod
    def _from_text(cls, text: str, where: str) -> Self:
        if not _HEX.fullmatch(text.strip()):
            raise InvalidArgumentError(f"{where} holds no key; {_ADVICE}")
        return cls(bytes.fromhex(text.strip()))

    def check_of(self, namespace: str) -> str:
        """Return 32 hex digits that tell this key from others, the same for all of a namespace."""
        return expand(self.secret, b"hct-key-check-1" + namespace.encode("ascii"), 16).hex()

    def fits(self, check: str, namespace: str) -> bool:
        """Whether the namespace that states this check is encrypted with this key."""
        # As bytes: text of other alphabets, which a damaged file may hold, is nothing that it compares.
        return hmac.compare_digest(self.check_of(namespace).encode(), check.encode(errors="replace"))

    def for_partition(self, place: str) -> bytes:
        """Return the key of a partition, by its path below the root."""
        return expand(self.secret, b"hct-partition-1" + place.encode("ascii"), KEY_NBYTES)


def stated_check(attributes: dict[str, Any], where: object) -> str:
    """Return the key check that a group's attributes state, "" where its pages are not encrypted.

    Raises
    ------
    EncryptionError
        Where they are encrypted in a way that this release does not know.
    """
    told = attributes.get("encryption")
    if told is None:
        return ""
    check = told.get("key_check") if isinstance(told, dict) else None
    if not isinstance(told, dict) or told.get("algorithm") != ALGORITHM or not isinstance(check, str):
        raise EncryptionError(
            f"{where}: its pages are encrypted in a way that is not known: {str(told)[:80]}."
        )
    return check


def encryption_attribute(check: str) -> dict[str, Any]:
    """Return what a group's attributes state of a key; nothing where there is none."""
    return {"encryption": {"algorithm": ALGORITHM, "key_check": check}} if check else {}


def match_key(key: EncryptionKey | None, check: str, namespace: str, where: object) -> None:
    """Check a key against what a group states.

    Raises
    ------
    EncryptionError
        Where it is another key, or where there is none and one is needed, or the other way round.
    """
    if key is None and check:
        raise EncryptionError(
            f"{where} is encrypted, and no key was given: name the key file it was made with "
            "(encryption=..., or --key-file)."
        )
    if key is not None and not check:
        raise EncryptionError(
            f"{where} is not encrypted, and a key was given: it would not protect its pages."
        )
    if key is not None and not key.fits(check, namespace):
        raise EncryptionError(
            f"{where} is encrypted with another key than the one given; nothing of it is read."
        )
