"""What the store is measured against besides the bare loop: other ways to keep pages on a disk."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from .errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .page_cache import Cache
    from .storage_cases import StorageShape


class Peer(Protocol):
    """Pages of a shape, kept in another way."""

    cache: Cache
    """How it meets the page cache where the shape is measured cold."""

    moves_pages: bool
    """Whether it moves the pool's pages, so that their bytes can be checked; a load generator has its own."""

    def __init__(
        self,
        folder: Path,
        shape: StorageShape,
        sources: Sequence[list[memoryview]],
        targets: Sequence[list[memoryview]],
    ) -> None:
        """Take a folder of its own, and the buffers of each page to write and to read into."""

    @staticmethod
    def why_not() -> str:
        """Return why it cannot be measured on this machine, or ""."""

    def write(self) -> float | None:
        """Write every page; the seconds where it measures them itself."""

    def read(self) -> float | None:
        """Read every page; the seconds where it measures them itself."""

    def files(self) -> list[Path]:
        """Return the files that hold the pages now."""

    def remove(self) -> None:
        """Delete the pages, so that the next write begins from nothing."""

    def close(self) -> None:
        """Let go of everything but the files."""


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A peer by name: module and class of it, and what it stands for."""

    name: str
    home: str
    kind: str
    what: str

    def _class(self) -> type[Peer]:
        found: type[Peer] = getattr(import_module(f"{__package__}.{self.home}"), self.kind)
        return found

    def why_not(self) -> str:
        """Return why it cannot be measured on this machine, or ""."""
        return self._class().why_not()

    def make(
        self,
        folder: Path,
        shape: StorageShape,
        sources: Sequence[list[memoryview]],
        targets: Sequence[list[memoryview]],
    ) -> Peer:
        """Make it; the folder is created."""
        folder.mkdir()
        return self._class()(folder, shape, sources, targets)


PEERS = {
    kind.name: kind
    for kind in (
        PeerKind(
            "file-a-page", "peer_files", "FileAPage", "one file a page: the I/O of SGLang's file backend"
        ),
        PeerKind("zarr-python", "peer_zarr", "ZarrPages", "a Zarr v3 array, one chunk a page, no codec"),
        PeerKind("tensorstore", "peer_tensorstore", "TensorStorePages", "the same array by tensorstore"),
        PeerKind("nixl", "peer_nixl", "NixlPages", "NIXL's POSIX plug-in over one file"),
        PeerKind("fio", "peer_fio", "Fio", "fio, psync, as many jobs as threads"),
    )
}
DEFAULT = ("file-a-page", "fio")


def chosen_peers(names: Sequence[str]) -> tuple[list[PeerKind], list[dict[str, str]]]:
    """Return the peers to measure, and those left out with the reason.

    Those that were not named are left out where they cannot be had; one that was named must be there.

    Raises
    ------
    BenchError
        Where one that was named cannot be had.
    """
    if "none" in names:
        return [], []
    asked = [] if "all" in names else list(names)
    wanted = asked or (list(PEERS) if names else list(DEFAULT))
    found, left_out = [], []
    for name in wanted:
        why = PEERS[name].why_not()
        if not why:
            found.append(PEERS[name])
        elif name in asked:
            raise BenchError(f"--peer {name}: {why}.")
        else:
            left_out.append({"peer": name, "reason": why})
    return found, left_out


def flat_page(page: Sequence[memoryview]) -> bytes:
    """Return a page in one piece, as those need it that take no lists of segments."""
    return bytes(page[0]) if len(page) == 1 else b"".join(page)


def spread_page(flat: memoryview, page: Sequence[memoryview]) -> None:
    """Copy a page in one piece to its segments."""
    at = 0
    for segment in page:
        segment[:] = flat[at : at + len(segment)]
        at += len(segment)
