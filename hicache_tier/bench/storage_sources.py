"""Where the rows of `bench storage` come from: one source a way between memory and disk.

A source of another kind is one line in `SOURCES`: its name, what tells why it cannot be measured in a
directory, and what makes its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from .peers import PeerKind
    from .storage_cases import StorageShape


class RowBench(Protocol):
    """Measures one shape; made with a directory and the shape, closed when it is done."""

    def check(self) -> None:
        """Move every page there and back and compare every byte.

        Raises
        ------
        BenchError
            Where bytes differ or pages are refused.
        """

    def rows(self, repeats: int, mixes: Sequence[int] = ()) -> list[dict[str, Any]]:
        """Return a row a direction: `put`, `get`, and `mixed` for each percentage of reads.

        A row has `engine`, `direction`, `read_percent`, what `StorageShape.as_row` says, `gb_s`, `bare_gb_s`,
        `ratio_to_bare`, `cpu_us_per_page`, `bare_cpu_us_per_page` and `cpu_ratio_to_bare`.
        """

    def against(self, kinds: Sequence[PeerKind], repeats: int) -> list[dict[str, Any]]:
        """Return a row a peer and direction; asked of the first source only, for shapes without checksums."""

    def close(self) -> None:
        """Remove everything that was written."""


@dataclass(frozen=True, slots=True)
class Source:
    """One source of rows.

    Attributes
    ----------
    name : str
        As `--engine` takes it, and in the rows' `engine`.
    look : callable
        Takes the directory; returns rows of `hicache_tier_storage.probe.probe`, one a mode. The source can be
        measured where one of them is usable.
    make : callable
        Takes the directory and a shape.
    encrypts : bool
        Whether shapes with encrypted pages can be measured.
    """

    name: str
    look: Callable[[Path], list[dict[str, Any]]]
    make: Callable[[Path, StorageShape], RowBench]
    encrypts: bool = True


@lru_cache(maxsize=4)
def _probed(root: Path) -> list[dict[str, Any]]:
    """Try all byte engines, once a run: each try is a process of its own."""
    from hicache_tier_storage.probe import probe

    return probe(root)


def _byte_engine(name: str) -> Source:
    def make(root: Path, shape: StorageShape) -> RowBench:
        from .storage_bench import StorageBench

        return StorageBench(root, shape, name)

    return Source(name, lambda root: [row for row in _probed(root) if row["engine"] == name], make)


def _device_route(name: str) -> Source:
    def make(root: Path, shape: StorageShape) -> RowBench:
        from .device_bench import DeviceBench

        return DeviceBench(root, shape, name)

    def look(root: Path) -> list[dict[str, Any]]:
        from .device_bench import modes_for_devices

        return modes_for_devices(name, _probed(root))

    return Source(f"gpu-{name}", look, make, encrypts=False)


_ENGINES = ("posix", "nixl", "kvikio")
SOURCES = {source.name: source for kind in (_byte_engine, _device_route) for source in map(kind, _ENGINES)}


def chosen_sources(root: Path, asked: str) -> tuple[list[Source], list[dict[str, Any]]]:
    """Return the source asked for, or with `all` those that work there, and why others are left out."""
    if asked != "all":
        return [SOURCES[asked]], []
    found, left_out = [], []
    for source in SOURCES.values():
        rows = source.look(root)
        if any(row["usable"] for row in rows):
            found.append(source)
        left_out += [row for row in rows if not row["usable"]]
    return found, left_out
