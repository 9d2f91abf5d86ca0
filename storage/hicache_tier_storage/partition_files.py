"""Where the files of a partition lie."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .inside import ARRAY_FILE, remove_inside

if TYPE_CHECKING:
    from pathlib import Path

_TABLE_NAME = re.compile(r"c\.(0|[1-9]\d{0,9})\.0", re.ASCII)


@dataclass(frozen=True, slots=True)
class PartitionPaths:
    """Where the files of a partition lie."""

    root: Path

    @property
    def namespace(self) -> str:
        """Name of the namespace."""
        return self.root.parts[-3]

    @property
    def pages(self) -> Path:
        """Folder of the `pages` array."""
        return self.root / "pages"

    @property
    def slots(self) -> Path:
        """Folder of the slot tables."""
        return self.root / "slots"

    @property
    def state(self) -> Path:
        """The state block."""
        return self.root / "state" / "c.0"

    @property
    def lock(self) -> Path:
        """What the writer holds an exclusive flock on."""
        return self.root / "state" / "writer.lock"

    @property
    def journal(self) -> Path:
        """The change journal."""
        return self.root / "state" / "journal"

    def slab(self, number: int, page_axes: int) -> Path:
        """Payload file of a slab."""
        return self.pages / (f"c.{number}" + ".0" * page_axes)

    def table(self, number: int) -> Path:
        """Slot table of a slab."""
        return self.slots / f"c.{number}.0"

    def slab_numbers(self) -> list[int]:
        """Numbers of the slot tables there are, ascending; files of other names are ignored."""
        if not self.slots.is_dir() or self.slots.is_symlink():
            return []
        names = (_TABLE_NAME.fullmatch(entry.name) for entry in self.slots.iterdir())
        return sorted(int(name[1]) for name in names if name)


def remove_slab(slab: Path, table: Path) -> None:
    """Unlink a slab, then its table, so that a crash between leaves a table without payload."""
    for path in (slab, table):
        with suppress(IsADirectoryError):
            remove_inside(path, ARRAY_FILE)
