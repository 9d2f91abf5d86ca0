"""`fio`, where it is installed: the same shape of I/O by the tool that disks are measured with."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

from .errors import BenchError
from .page_cache import Cache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .storage_cases import StorageShape

_TIMEOUT_S = 300


class Fio:
    """One job a thread, each with its part of one file, one block of a page's size a call (`psync`)."""

    moves_pages = False

    @staticmethod
    def why_not() -> str:
        """Return why it cannot be measured, or ""."""
        return "" if shutil.which("fio") else "fio is not installed"

    def __init__(
        self,
        folder: Path,
        shape: StorageShape,
        sources: Sequence[list[memoryview]],
        targets: Sequence[list[memoryview]],
    ) -> None:
        del sources, targets
        self._path = folder / "fio"
        self._direct = shape.mode == "direct"
        self.cache = Cache.BYPASSED if self._direct else Cache.DROPPED
        self._jobs = min(shape.threads, shape.case.pages)
        self._block = shape.case.page_nbytes
        self._part = shape.case.pages // self._jobs * self._block
        self._scale = shape.case.nbytes / (self._part * self._jobs)
        self._flush = shape.cache is Cache.DROPPED
        self._path.touch()
        self._run("write")

    def write(self) -> float:
        """Write every block; return the seconds that as many bytes as the case has take."""
        return self._run("write")

    def read(self) -> float:
        """Read every block."""
        return self._run("read")

    def files(self) -> list[Path]:
        """Return its file."""
        return [self._path]

    def remove(self) -> None:
        """Leave the file: it is written in place, as slabs are."""

    def close(self) -> None:
        """Nothing is open."""

    def _run(self, what: str) -> float:
        options = {
            "name": "pages",
            "filename": self._path,
            "rw": what,
            "bs": self._block,
            "size": self._part,
            "offset_increment": self._part,
            "numjobs": self._jobs,
            "ioengine": "psync",
            "direct": int(self._direct),
            "invalidate": 0,  # the cache is dropped, or left, for all contestants alike
            "end_fsync": int(self._flush and what == "write"),
            "output-format": "json",
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        fio = shutil.which("fio") or "fio"
        try:
            out = subprocess.run(
                [fio, *arguments, "--thread", "--group_reporting"],
                capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, cwd=self._path.parent,
            )  # fmt: skip
            (job,) = json.loads(out.stdout[out.stdout.index("{") :])["jobs"]
            rate = float(job[what]["bw_bytes"])
        except (subprocess.TimeoutExpired, ValueError, KeyError) as error:
            raise BenchError(f"fio failed: {error}") from error
        if out.returncode or job["error"] or not rate:
            raise BenchError(f"fio failed: {out.stderr.strip() or job['error'] or 'it moved nothing'}")
        return self._part * self._jobs * self._scale / rate
