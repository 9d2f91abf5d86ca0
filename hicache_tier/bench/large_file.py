"""kvikio's own best: GPU memory in one piece to and from one large file, with as many threads as do best."""

from __future__ import annotations

import os
import time
from statistics import median
from typing import TYPE_CHECKING

from hicache_tier_storage.device_bytes import DeviceBytes
from hicache_tier_storage.kvikio_package import kvikio_module, why_no_kvikio

from .errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

THREADS = (1, 4, 8, 16, 32)


class LargeFile:
    """One file, as large as the memory, that kvikio writes and reads in one call.

    Parameters
    ----------
    path : Path
    memory : torch.Tensor
        uint8, on a CUDA device, in one piece.

    Attributes
    ----------
    write_threads, read_threads : int
        Of kvikio, as many as it writes and reads fastest with, once `tune` has found out.
    """

    def __init__(self, path: Path, memory: torch.Tensor) -> None:
        why = why_no_kvikio()
        if why:
            raise BenchError(why)
        self.path = path
        self.write_threads = self.read_threads = 1
        self._bytes = DeviceBytes(memory.data_ptr(), memory.nbytes)
        self._memory = memory  # kept
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, memory.nbytes)
        self._file = kvikio_module().CuFile(path, "r+")

    def tune(self, before_read: Callable[[], None], turns: int = 3) -> None:
        """Try numbers of threads, in both directions; the medians of some turns decide."""
        times: dict[tuple[str, int], float] = {}
        self.write()  # blocks that were never written are another matter
        for threads in THREADS:
            for name, before, move in (("w", _nothing, self.write), ("r", before_read, self.read)):
                use(threads)
                turn = []
                for _ in range(turns):
                    before()
                    start = time.perf_counter()
                    move()
                    turn.append(time.perf_counter() - start)
                times[name, threads] = median(turn)
        self.write_threads, self.read_threads = (
            min(THREADS, key=lambda threads: times[name, threads]) for name in "wr"
        )

    def write(self) -> None:
        """Write all of the memory."""
        self._check(self._file.pwrite(self._bytes).get())

    def read(self) -> None:
        """Read all of it."""
        self._check(self._file.pread(self._bytes).get())

    def _check(self, moved: int) -> None:
        if moved != self._memory.nbytes:
            raise BenchError(f"kvikio moved {moved} bytes of {self._memory.nbytes}")

    def close(self) -> None:
        """Remove the file."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def use(threads: int) -> None:
    """Give kvikio so many threads, which takes a moment."""
    kvikio_module().defaults.set("num_threads", threads)


def _nothing() -> None:
    pass
