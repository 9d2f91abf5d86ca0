"""Who may read and write what a store makes, and whose files it takes."""

from __future__ import annotations

import os
from enum import Enum
from typing import TYPE_CHECKING

from hicache_tier.errors import StoreError, not_known

if TYPE_CHECKING:
    from pathlib import Path


class Access(Enum):
    """Who beside the owner may use the files and folders that a store makes."""

    PRIVATE = "private"
    GROUP_READ = "group_read"
    GROUP = "group"

    @classmethod
    def parse(cls, value: object) -> Access:
        """Take a name or a member."""
        try:
            return cls(value)
        except ValueError:
            raise not_known("access", value, [member.value for member in cls]) from None

    @property
    def file_mode(self) -> int:
        """Permissions of a file."""
        return {Access.PRIVATE: 0o600, Access.GROUP_READ: 0o640, Access.GROUP: 0o660}[self]

    @property
    def folder_mode(self) -> int:
        """Permissions of a folder; those that a group writes to hand their group on."""
        return {Access.PRIVATE: 0o700, Access.GROUP_READ: 0o750, Access.GROUP: 0o2770}[self]

    def settle(self, fd: int) -> None:
        """Give a new file its permissions, which the process's umask may have narrowed."""
        if self is not Access.PRIVATE:
            os.fchmod(fd, self.file_mode)

    def make_folder(self, path: Path) -> None:
        """Make a folder where there is none, and those above it; one that is there stays as it is."""
        if not path.parent.exists():
            self.make_folder(path.parent)
        try:
            path.mkdir(mode=self.folder_mode & 0o777)
        except FileExistsError:
            if not path.is_dir():
                raise
            return
        if self is not Access.PRIVATE:
            path.chmod(self.folder_mode)


class Owners(Enum):
    """Whose files a store takes for its own."""

    SELF = "self"
    ANY = "any"

    @classmethod
    def parse(cls, value: object) -> Owners:
        """Take a name or a member."""
        try:
            return cls(value)
        except ValueError:
            raise not_known("owners", value, [member.value for member in cls]) from None

    def check(self, folder: Path) -> None:
        """Refuse a folder of another user, unless that is root, who may do anything anyway.

        One that is not there yet is as good as the process's own.

        Raises
        ------
        StoreError
            Naming both users.
        """
        if self is Owners.ANY:
            return
        try:
            owner = folder.stat().st_uid
        except (FileNotFoundError, NotADirectoryError):
            return
        if owner not in {os.geteuid(), 0}:
            raise StoreError(
                f"{folder} belongs to user {owner}, and this process is user {os.geteuid()}: whoever owns it "
                "decides which bytes are served. owners='any' takes it all the same."
            )
