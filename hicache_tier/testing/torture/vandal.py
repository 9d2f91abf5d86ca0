"""What happens to the files of a store: bits flip, files are cut, swapped, replaced, rewritten by others."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

    from .arena import Arena

_BLOCK = 4096


class Vandal:
    """Damages files of an arena, one at a time.

    A slot table is mapped by those who work with it, and to cut a mapped file ends them (SIGBUS), so tables
    are cut only when everybody is dead.

    Parameters
    ----------
    arena : Arena
    random : Random

    Attributes
    ----------
    done : Counter of str
        What was done, how often.
    """

    def __init__(self, arena: Arena, random: Random) -> None:
        self._arena, self._random = arena, random
        self.done: Counter[str] = Counter()
        self._live: list[Callable[[Path], object]] = [
            self.flip_bit,
            self.flip_bit,
            self.zero_block,
            self.swap_blocks,
            self.replace_by_copy,
            self.remove,
        ]

    def strike(self, *, alone: bool) -> None:
        """Damage something; `alone` where nobody works in the arena."""
        files = self._files()
        if not files:
            return
        path = self._random.choice(files)
        deeds = list(self._live)
        if alone or path.parent.name != "slots":
            deeds += [self.cut, self.grow]
        deed = self._random.choice(deeds)
        try:
            deed(path)
        except OSError:
            return  # the file went meanwhile, or the disk is full
        self.done[deed.__name__] += 1

    def _files(self) -> list[Path]:
        """Slabs and tables three times as often as all else."""
        found: list[Path] = []
        for paths in self._arena.partitions():
            for folder in (paths.pages, paths.slots, paths.root / "state"):
                names = sorted(folder.glob("*")) if folder.is_dir() else []
                often = 1 if folder.name == "state" else 3
                found += [path for path in names if path.is_file() and path.name != "writer.lock"] * often
            found.append(paths.root / "zarr.json")
        return found

    def flip_bit(self, path: Path) -> None:
        """Flip a bit."""
        with path.open("r+b", buffering=0) as file:
            at = self._random.randrange(max(1, os.fstat(file.fileno()).st_size))
            byte = os.pread(file.fileno(), 1, at)
            if byte:
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << self._random.randrange(8)]), at)

    def zero_block(self, path: Path) -> None:
        """Zero 4 KiB."""
        with path.open("r+b", buffering=0) as file:
            blocks = os.fstat(file.fileno()).st_size // _BLOCK
            if blocks:
                os.pwrite(file.fileno(), bytes(_BLOCK), self._random.randrange(blocks) * _BLOCK)

    def swap_blocks(self, path: Path) -> None:
        """Swap two blocks of 4 KiB, which in a slab are pages."""
        with path.open("r+b", buffering=0) as file:
            blocks = os.fstat(file.fileno()).st_size // _BLOCK
            if blocks > 1:
                first, second = (self._random.randrange(blocks) * _BLOCK for _ in range(2))
                one, other = (os.pread(file.fileno(), _BLOCK, at) for at in (first, second))
                os.pwrite(file.fileno(), other, first)
                os.pwrite(file.fileno(), one, second)

    def cut(self, path: Path) -> None:
        """Cut to nothing, a half, or all but a byte."""
        size = path.stat().st_size
        os.truncate(path, self._random.choice([0, size // 2, max(0, size - 1)]))

    def grow(self, path: Path) -> None:
        """Add a byte."""
        os.truncate(path, path.stat().st_size + 1)

    def remove(self, path: Path) -> None:
        """Remove it."""
        path.unlink()

    def replace_by_copy(self, path: Path) -> None:
        """Put another file with the same bytes in its place."""
        copy = path.with_name("a-copy")
        shutil.copyfile(path, copy)
        copy.replace(path)
