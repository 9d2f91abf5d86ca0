"""A bare loop of `pwritev`/`preadv` over slots of files: what the same bytes cost without a store."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from .errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Call = Callable[[int, list[memoryview], int], int]


class BareLoop:
    """`pwritev`/`preadv`, one page a call, by as many threads, in batches of as many pages as the store gets.

    Parameters
    ----------
    places : list of (path, offset)
        Where each page lies.
    buffers : list of list of memoryview
        Each page's memory.
    direct : bool
        Open with O_DIRECT.
    threads : int
    depth : int, optional
        Pages that are under way before the next batch begins; all of them where left out.
    """

    def __init__(
        self,
        places: Sequence[tuple[Path, int]],
        buffers: Sequence[list[memoryview]],
        *,
        direct: bool,
        threads: int,
        depth: int | None = None,
    ) -> None:
        self.paths = sorted({path for path, _ in places})
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._files = {path: os.open(path, flags) for path in self.paths}
        self._work = [
            (self._files[path], buffer, offset)
            for (path, offset), buffer in zip(places, buffers, strict=True)
        ]
        self._depth = max(1, depth or len(self._work))
        self._threads = min(threads, self._depth)

    def write(self) -> None:
        """Write every page."""
        self._run(os.pwritev)

    def read(self) -> None:
        """Read every page."""
        self._run(os.preadv)

    def _run(self, call: Call) -> None:
        errors: list[BaseException] = []
        together = threading.Barrier(self._threads)
        batches = range(0, len(self._work), self._depth)

        def work(first: int) -> None:
            try:
                for start in batches:
                    for fd, buffer, offset in self._work[start : start + self._depth][first :: self._threads]:
                        _check(call(fd, buffer, offset), buffer)
                    if self._threads > 1 and len(batches) > 1:
                        together.wait()
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                errors.append(error)
                together.abort()

        helpers = [threading.Thread(target=work, args=(first,)) for first in range(1, self._threads)]
        for helper in helpers:
            helper.start()
        work(0)
        for helper in helpers:
            helper.join()
        if errors:
            raise BenchError(f"the bare loop failed: {errors[0]}") from errors[0]

    def close(self) -> None:
        """Close the files."""
        for fd in self._files.values():
            os.close(fd)


def _check(moved: int, buffer: list[memoryview]) -> None:
    wanted = sum(map(len, buffer))
    if moved != wanted:
        raise BenchError(f"a call moved {moved} bytes of {wanted}")
