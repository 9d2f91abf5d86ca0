"""A process that exports a root, and reads the archives."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier.errors import StoreError
from hicache_tier_storage.archive import export_archive, open_archive

from .board import Field, Phase
from .pages import CHAIN, PAGE_NBYTES, content, numbers_of
from .worker import Worker

if TYPE_CHECKING:
    from hicache_tier_storage.archive import ArchivePart


class Exporter(Worker):
    """Exports the root while others write to it, and reads the archive."""

    def work(self) -> None:
        """Make one archive, and check every page of it."""
        self.board[Field.PHASE] = Phase.RUNNING
        target = Path(self.duty.board).with_suffix(".archive")
        try:
            with self.operation("export"):
                export_archive(self.duty.root, target, threads=1, overwrite=True)
            with self.operation("read archive"), open_archive(target) as archive:
                for part in archive.parts:
                    self.check(part)
        except StoreError:  # a root that nobody has made yet, or without a page
            self.board.add(Field.REFUSED, 1)
            time.sleep(0.2)
        else:
            self.board.add(Field.EXPORTS, 1)

    def check(self, part: ArchivePart) -> None:
        """Read all pages of a part of an archive."""
        out = np.zeros((CHAIN, PAGE_NBYTES), np.uint8)
        for first, rows in part.chunks():
            for at in range(0, len(rows), CHAIN):
                some = rows[at : at + CHAIN]
                numbers = numbers_of(key.tobytes() for key in some["key"])
                reasons = part.read_pages(first + at + np.arange(len(some)), out[: len(some)])
                equal = (out[: len(some)].view(np.uint64) == content(numbers)).all(axis=1)
                wrong = [
                    reason or "other bytes" for reason, same in zip(reasons, equal, strict=True) if not same
                ]
                self.board.add(Field.READS, len(some))
                if wrong:
                    self.board.add(Field.WRONG, len(wrong))
                    self.find("wrong bytes in an archive", reasons=wrong[:5], count=len(wrong))
