"""Payload throughput of the store as ratios to a bare loop: put, get, and both at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from .storage_against import against
from .storage_rig import StorageRig
from .timing import Contestant, Samples, ratio, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .peers import PeerKind
    from .storage_cases import StorageShape


class StorageBench:
    """Rows of one shape by one byte engine of the store; see `storage_sources.RowBench`.

    Parameters
    ----------
    root : Path
        Directory to measure in; what is written there is removed by `close`.
    shape : StorageShape
    engine : str
        Byte engine of the store.
    """

    def __init__(self, root: Path, shape: StorageShape, engine: str = "posix") -> None:
        self._rig = StorageRig(root, shape, engine)
        self._shape = shape

    def check(self) -> None:
        """Move every page there and back and compare every byte; leaves the pages stored."""
        self._rig.check()

    def rows(self, repeats: int, mixes: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Time put, get, and mixes of so many per cent of reads against the bare loop."""
        rig = self._rig
        bare = rig.bare(rig.slots(), range(self._shape.case.pages))
        cold = rig.dropping(bare.paths)

        def make_room() -> None:
            rig.clear()
            cold()

        try:
            put = take_turns(
                [
                    Contestant("bare", rig.settled(bare.write, bare.paths), cold),
                    Contestant("store", rig.settled(rig.put, bare.paths), make_room),
                ],
                repeats,
            )
            get = take_turns(
                [Contestant("bare", bare.read, cold), Contestant("store", rig.get, cold)], repeats
            )
        finally:
            bare.close()
        found = [
            self._row("put", put, 0),
            self._row("get", get, 100),
            *(self._row("mixed", self._mixed(percent, repeats), percent) for percent in mixes),
        ]
        rig.check_bypass()
        return found

    def against(self, kinds: Sequence[PeerKind], repeats: int) -> list[dict[str, Any]]:
        """Time put and get against peers that hold the same pages."""
        return against(self._rig, kinds, repeats)

    def close(self) -> None:
        """Remove everything that was written."""
        self._rig.close()

    def _mixed(self, percent: int, repeats: int) -> dict[str, Samples]:
        """Read the first pages while the others are written, one caller each, as engines do it.

        The bare loop has a file of its own: in the slots of the store it would write over pages in use.
        """
        rig, count, threads = self._rig, self._shape.case.pages, self._shape.threads
        reads = range(max(1, min(count - 1, count * percent // 100)))
        writes = range(len(reads), count)
        plain, ours = rig.plain_file(), sorted({path for path, _ in rig.slots()})
        readers = max(1, threads * len(reads) // count)
        reading = rig.bare([plain[page] for page in reads], reads, readers)
        writing = rig.bare([plain[page] for page in writes], writes, max(1, threads - readers))
        rig.clear()
        rig.put()
        rig.blank_spare()

        def bare() -> None:
            _together(reading.read, writing.write)

        def store() -> None:
            _together(lambda: rig.get(rig.spare, reads), lambda: rig.put(writes))

        def free_slots() -> None:
            rig.delete(writes)
            rig.drop(ours)

        try:
            samples = take_turns(
                [
                    Contestant("bare", rig.settled(bare, writing.paths), rig.dropping(reading.paths)),
                    Contestant("store", rig.settled(store, ours), free_slots),
                ],
                repeats,
            )
        finally:
            reading.close()
            writing.close()
        rig.compare("the store, beside writes,", reads)
        return samples

    def _row(self, direction: str, samples: dict[str, Samples], read_percent: int) -> dict[str, Any]:
        ours, bare = samples["store"], samples["bare"]
        count, nbytes = self._shape.case.pages, self._shape.case.nbytes
        return {
            "engine": self._rig.engine,
            "direction": direction,
            "read_percent": read_percent,
            **self._shape.as_row(),
            "gb_s": nbytes / ours.seconds / 1e9,
            "bare_gb_s": nbytes / bare.seconds / 1e9,
            "ratio_to_bare": ratio(ours.wall, bare.wall),
            "cpu_us_per_page": ours.cpu_seconds / count * 1e6,
            "bare_cpu_us_per_page": bare.cpu_seconds / count * 1e6,
            "cpu_ratio_to_bare": 1 / ratio(ours.cpu, bare.cpu),
        }


def _together(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run two things at once; what either raises is raised."""
    errors: list[BaseException] = []

    def other() -> None:
        try:
            second()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        first()
    finally:
        thread.join()
    if errors:
        raise errors[0]
