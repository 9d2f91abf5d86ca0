"""One file a page."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from .page_cache import Cache
from .peers import flat_page, spread_page

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .storage_cases import StorageShape


class FileAPage:
    """One file a page, in one thread: the I/O of SGLang's file backend (0.5.23).

    A page is flattened, written to a file of its own and renamed; it is read into a flat page and copied to
    its place. What that backend does besides (keys, look-ups, eviction) is left out.
    """

    cache = Cache.DROPPED
    moves_pages = True

    @staticmethod
    def why_not() -> str:
        """Return "": it needs nothing."""
        return ""

    def __init__(
        self,
        folder: Path,
        shape: StorageShape,
        sources: Sequence[list[memoryview]],
        targets: Sequence[list[memoryview]],
    ) -> None:
        del shape
        self._paths = [folder / f"page_{number}.bin" for number in range(len(sources))]
        self._sources, self._targets = sources, targets

    def write(self) -> None:
        """Write every page into a new file."""
        for path, page in zip(self._paths, self._sources, strict=True):
            temporary = path.with_suffix(".tmp")
            with temporary.open("wb", buffering=0) as file:
                file.write(flat_page(page))
            temporary.replace(path)

    def read(self) -> None:
        """Read every page."""
        for path, page in zip(self._paths, self._targets, strict=True):
            flat = np.empty(sum(map(len, page)), np.uint8)
            with path.open("rb", buffering=0) as file:
                if file.readinto(flat.data) != len(flat):
                    raise OSError(f"{path} is short")
            spread_page(flat.data, page)

    def files(self) -> list[Path]:
        """Return all of them."""
        return self._paths

    def remove(self) -> None:
        """Delete every file."""
        for path in self._paths:
            with suppress(FileNotFoundError):
                path.unlink()

    def close(self) -> None:
        """Nothing is open."""
