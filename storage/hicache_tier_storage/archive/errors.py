"""Errors of archives."""

from __future__ import annotations

from hicache_tier.errors import StoreError


class ArchiveError(StoreError):
    """An archive cannot be read or written as asked; nothing was changed."""

    kind = "archive"


class NotAnArchiveError(ArchiveError):
    """What is there is not a finished archive."""

    kind = "not_an_archive"


class ArchiveExistsError(ArchiveError):
    """The destination exists and was not to be overwritten."""

    kind = "archive_exists"
