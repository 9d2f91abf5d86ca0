"""Faults of a disk, which only an engine meets: writes that end halfway, writes that a power loss undoes."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .call import going_out
from .fault import Fault

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .call import Call, When


class TearWrites(Fault):
    """Only the first bytes of each page reach the file; the rest of the slot stays what it was.

    Parameters
    ----------
    nbytes : int
        That reach it.
    silent : bool
        Whether the engine says that all went well, as a disk does that loses power afterwards.
    """

    needs_file = True

    def __init__(self, nbytes: int, when: When = going_out, *, silent: bool = False) -> None:
        super().__init__(when)
        self._nbytes, self._silent = nbytes, silent

    def strike(self, call: Call, go: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the call returns
        """Write, and put the old rest back."""
        slots = _slots(call)
        before = [_read(*slot) for slot in slots]
        answer = go()
        for (path, offset, _), data in zip(slots, before, strict=True):
            _write(path, offset + self._nbytes, data[self._nbytes :])
        return answer if self._silent else [call.verdict("io_error: torn")] * call.count


class LoseUnsynced(Fault):
    """Remembers what was overwritten, so that a power loss can undo it.

    Attributes
    ----------
    unsynced : int
        Pages written since the last `sync`.
    """

    needs_file = True

    def __init__(self, when: When = going_out) -> None:
        super().__init__(when)
        self._before: list[tuple[Path, int, bytes]] = []
        self._lock = threading.Lock()

    @property
    def unsynced(self) -> int:
        """Pages written since the last `sync`."""
        return len(self._before)

    def strike(self, call: Call, go: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the call returns
        """Remember, then write."""
        with self._lock:
            self._before += [(path, offset, _read(path, offset, n)) for path, offset, n in _slots(call)]
        return go()

    def sync(self) -> None:
        """Take everything written so far as safe."""
        with self._lock:
            self._before.clear()

    def lose(self, share: float = 1.0, *, seed: int = 0) -> int:
        """Undo a share of what was written since the last `sync`; return how many pages."""
        rng = random.Random(seed)
        with self._lock:
            lost = [entry for entry in reversed(self._before) if rng.random() < share]
            for path, offset, data in lost:
                _write(path, offset, data)
            self._before.clear()
        return len(lost)


def _slots(call: Call) -> list[tuple[Path, int, int]]:
    """Return file, offset and length of each page of a call."""
    batch = call.batch
    assert batch is not None, "stores are refused when they are wrapped"
    return [
        (file.path, int(offset), batch.page_nbytes)
        for file, offset in zip(batch.files, batch.offsets, strict=True)
    ]


def _read(path: Path, offset: int, nbytes: int) -> bytes:
    """Return what a slot holds; nothing where there is no file, which the engine finds out by itself."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(offset)
        return file.read(nbytes)
    return b""


def _write(path: Path, offset: int, data: bytes) -> None:
    with suppress(FileNotFoundError), path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
