"""What the store is measured against: a bare loop over the same slab, and one file a page."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hicache_tier.host_pool import HostPool


def page_buffers(host: HostPool, pages: Sequence[int]) -> list[list[memoryview]]:
    """View each page's segments as buffers, once, so that no peer pays for it."""
    return [
        [memoryview((ctypes.c_ubyte * nbytes).from_address(address)) for address, nbytes in row]
        for row in host.segments(pages)
    ]


class BareLoop:
    """`pwritev`/`preadv`, one page a call, by `threads` threads over slots of slab files.

    Parameters
    ----------
    places : list of (path, offset)
        Where each page lies.
    buffers : list of list of memoryview
        Each page's memory.
    direct : bool
        Open with O_DIRECT.
    """

    def __init__(
        self, places: list[tuple[Path, int]], buffers: list[list[memoryview]], *, direct: bool, threads: int
    ) -> None:
        self._files = {
            path: os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
            for path in {path for path, _ in places}
        }
        self._work = [
            (self._files[path], buffer, offset)
            for (path, offset), buffer in zip(places, buffers, strict=True)
        ]
        self._threads = threads

    def write(self) -> None:
        """Write every page."""
        self._run(os.pwritev)

    def read(self) -> None:
        """Read every page."""
        self._run(os.preadv)

    def _run(self, call: Callable[[int, list[memoryview], int], int]) -> None:
        def work(first: int) -> None:
            for fd, buffer, offset in self._work[first :: self._threads]:
                call(fd, buffer, offset)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(self._threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Close the files."""
        for fd in self._files.values():
            os.close(fd)


class FileAPage:
    """One file a page, in one thread: the I/O of SGLang's file backend (0.5.23).

    A page is flattened into one tensor, written to a file of its own and renamed; it is read into a flat page
    and copied to its place. What that backend does besides (keys, look-ups, eviction) is left out.
    """

    def __init__(self, folder: Path, buffers: list[list[memoryview]]) -> None:
        folder.mkdir()
        self._paths = [folder / f"page_{number}.bin" for number in range(len(buffers))]
        self._pages = [[np.frombuffer(segment, np.uint8) for segment in page] for page in buffers]

    def write(self) -> None:
        """Write every page into a new file."""
        for path, page in zip(self._paths, self._pages, strict=True):
            temporary = path.with_suffix(".tmp")
            np.concatenate(page).tofile(temporary)
            temporary.replace(path)

    def read(self) -> None:
        """Read every page."""
        for path, page in zip(self._paths, self._pages, strict=True):
            flat = np.empty(sum(len(segment) for segment in page), np.uint8)
            with path.open("rb", buffering=0) as file:
                if file.readinto(flat.data) != len(flat):
                    raise OSError(f"{path} is short")
            at = 0
            for segment in page:
                segment[:] = flat[at : at + len(segment)]
                at += len(segment)

    def remove(self) -> None:
        """Delete every file."""
        for path in self._paths:
            with suppress(FileNotFoundError):
                path.unlink()

    def drop_cache(self) -> None:
        """Put the files out of the page cache."""
        drop_cache(self._paths)


def drop_cache(paths: Sequence[Path]) -> None:
    """Write files back and take them out of the page cache."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
