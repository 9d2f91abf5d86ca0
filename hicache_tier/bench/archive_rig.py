"""Stores to export, and archives to import, for the measurements of archives; every byte can be told."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier.geometry import KVGeometry
from hicache_tier_storage import open_store
from hicache_tier_storage.archive import Conversion, export_archive, import_archive, open_archive
from hicache_tier_storage.archive.staging import StagedPages
from hicache_tier_storage.record import keys_of

from .errors import BenchError
from .storage_pages import make_keys

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HEADS, _HEAD_DIM, _PAGE_TOKENS, _DTYPE = 8, 128, 16, "bfloat16"
_LAYER_NBYTES = 2 * _HEADS * _HEAD_DIM * 2 * _PAGE_TOKENS
_BATCH_NBYTES = 32 << 20
RANKS = 8
_COPIES = 4  # stores and archives that are there at once
_LEAST_PAGES = 16  # the store that is written to while it is exported holds four times as many


class ArchiveRig:
    """A folder with a store of one rank, the same bytes over 8 ranks, and plain copies of files.

    Pages hold bfloat16 values of a normal distribution, which compress as those of a cache do.

    Parameters
    ----------
    root : Path
        Where the folder is made.
    nbytes, page_nbytes : int
        Payload of each store, and bytes of a page of the store of one rank.
    """

    def __init__(self, root: Path, nbytes: int, page_nbytes: int) -> None:
        layers, rest = divmod(page_nbytes, _LAYER_NBYTES)
        if rest or not layers:
            raise BenchError(f"page size {page_nbytes} is not a multiple of {_LAYER_NBYTES} bytes.")
        self.pages = nbytes // page_nbytes
        if self.pages < _LEAST_PAGES:
            raise BenchError(
                f"size {nbytes} holds {self.pages} pages of {page_nbytes} bytes; at least {_LEAST_PAGES}, "
                f"{_LEAST_PAGES * page_nbytes} bytes, are needed. Raise --size or lower --page."
            )
        free = shutil.disk_usage(root).free
        if _COPIES * nbytes > free:
            raise BenchError(
                f"{_COPIES} times {nbytes} bytes are needed, and {root} has {free} free. Lower --size."
            )
        self.page_nbytes = page_nbytes
        self.nbytes = self.pages * page_nbytes
        self._layers = layers
        self.folder = Path(tempfile.mkdtemp(prefix="hct-bench-", dir=root))
        self.keys = make_keys("archive", self.pages)
        self.capacity = 2 * self.nbytes + (16 << 20)

    def geometry(self, ranks: int) -> KVGeometry:
        """Return what a page of one of so many ranks holds."""
        return KVGeometry.mha(
            num_layers=self._layers,
            num_kv_heads=_HEADS // ranks,
            head_dim=_HEAD_DIM,
            dtype=_DTYPE,
            page_tokens=_PAGE_TOKENS,
        )

    def path(self, name: str) -> Path:
        """Return a path in the folder."""
        return self.folder / name

    def fill(self, name: str, ranks: int) -> Path:
        """Make a store of so many ranks."""
        geometry = self.geometry(ranks)
        step = max(1, _BATCH_NBYTES // geometry.page_nbytes)
        for rank in range(ranks):
            random = np.random.default_rng(rank)
            with open_store(
                self.path(name),
                geometry,
                "page_first",
                model="bench",
                tp=(rank, ranks),
                capacity_bytes=self.capacity,
                io_mode="buffered",
            ) as store:
                for at in range(0, self.pages, step):
                    keys = self.keys[at : at + step]
                    pages = _values(random, len(keys), geometry.page_nbytes)
                    parents = [self.keys[i - 1] if i else None for i in range(at, at + len(keys))]
                    put = store.put(
                        keys, StagedPages(geometry, store.layout, pages), range(len(keys)), parents=parents
                    )
                    if not all(put):
                        raise BenchError(f"put failed: {store.stats()['put']}")
        return self.path(name)

    def drop(self, *names: str) -> None:
        """Remove what an earlier turn wrote; what of it was not on disk yet never gets there."""
        for name in names:
            path = self.path(name)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def check(self, archive: str, conversion: Conversion, back: Conversion) -> None:
        """Import an archive converted, export that, import it converted back, and compare every byte.

        Raises
        ------
        BenchError
            Where a page is missing or differs.
        """
        names = ("check-1", "check-2", "check-3", "check-4")
        self.drop(*names)
        once, between, again, last = (self.path(name) for name in names)
        for source, target, how in ((self.path(archive), once, conversion), (between, again, back)):
            report = import_archive(source, target, conversion=how, capacity_bytes=self.capacity)
            if report.refused:
                raise BenchError(f"pages were refused: {report.refused}")
            export_archive(target, between if target == once else last)
        if _digests(self.path(archive)) != _digests(last):
            raise BenchError(f"pages of {archive} came back with other bytes")
        self.drop(*names)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _values(random: np.random.Generator, pages: int, page_nbytes: int) -> NDArray[np.uint8]:
    values = random.standard_normal((pages, page_nbytes // 2), np.float32)
    halves = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return halves.view(np.uint8)


def _digests(path: Path) -> dict[tuple[str, bytes], int]:
    """Checksum of every page of an archive, by rank and key; each compared with its bytes."""
    found = {}
    with open_archive(path) as archive:
        for part in archive.parts:
            step = max(1, _BATCH_NBYTES // part.facts.geometry.page_nbytes)
            out = np.empty((step, part.facts.geometry.page_nbytes), np.uint8)
            for at in range(0, part.facts.pages, step):
                numbers = np.arange(at, min(at + step, part.facts.pages))
                if any(part.read_pages(numbers, out[: len(numbers)])):
                    raise BenchError(f"{path} holds pages that are not what they should be")
                rows = part.rows(numbers)
                for key, total in zip(keys_of(rows), rows["checksum"].tolist(), strict=True):
                    found[part.facts.name.rank, key] = total
    return found
