"""Verdict on one page of a batch."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, Self


class PageStatus(int):
    """Truth value of one page's outcome, and why.

    Compares and counts as a bool: 1 where the page was stored or loaded, else 0.

    Attributes
    ----------
    reason : str
        `stored`, `already_stored`, `loaded`; or why not: `absent`, `changed`, `checksum`, `capacity`,
        `disk_full`, `root_busy`, `io_error: ...`, `damaged: ...`, `access_denied`, ...; `store_gone`: its
        folder or its lock was removed, and nothing is stored or loaded there until it is opened again;
        `timeout: ...`: the byte engine gave up waiting, and bytes may still arrive in the page's memory.
    """

    reason: str

    def __new__(cls, ok: bool, reason: str) -> Self:
        """Make a verdict."""
        self = super().__new__(cls, ok)
        self.reason = reason
        return self

    @property
    def kind(self) -> str:
        """The reason without its details, for counters."""
        return kind_of(self.reason)

    def __repr__(self) -> str:
        return f"PageStatus({bool(self)}, {self.reason!r})"

    def __reduce__(self) -> tuple[type[PageStatus], tuple[bool, str]]:
        return (PageStatus, (bool(self), self.reason))


def kind_of(reason: str) -> str:
    """Return a reason without its details."""
    return reason.partition(":")[0]


@lru_cache(maxsize=256)
def failed(reason: str) -> PageStatus:
    """Return the verdict of a page that was not stored or loaded."""
    return PageStatus(False, reason)


STORED: Final = PageStatus(True, "stored")
ALREADY_STORED: Final = PageStatus(True, "already_stored")
LOADED: Final = PageStatus(True, "loaded")
DELETED: Final = PageStatus(True, "deleted")
ABSENT: Final = failed("absent")
CHANGED: Final = failed("changed")
CHECKSUM: Final = failed("checksum")
STORE_GONE: Final = failed("store_gone")
