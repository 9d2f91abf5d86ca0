"""Reading pages of an archive as those of a target: checked, and converted where they differ."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier_storage.record import keys_of

from .convert import Shape, convert_pages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .reader import ArchivePart
    from .targets import Target
    from .units import RowFinder, Units


class BatchReader:
    """Reads, checks and converts batches of one target."""

    def __init__(self, target: Target, finders: list[RowFinder]) -> None:
        self._target = target
        self._finders = finders
        self._local = threading.local()

    def read(self, units: Units) -> tuple[NDArray[np.uint8], list[str]]:
        """Return pages `uint8 [u * r, page_nbytes]` and "" or what is wrong with each.

        The pages are good until this thread calls again.
        """
        target, (count, group), each = self._target, units.rows.shape, units.pages_each
        rows = units.rows.reshape(-1)
        first = target.pieces[0].part
        out = self._memory("out", count * each, target.shape.geometry.page_nbytes)
        if target.unchanged:
            return out, first.read_pages(rows, out)
        index = first.rows(rows)
        bad: dict[int, str] = {}
        for number, piece in enumerate(target.pieces):
            numbers = rows if not number else self._finders[number - 1].find(index)
            pages, reasons = self._pages(piece.part, numbers, keys_of(index))
            self._note(bad, reasons, group)
            shape = Shape(piece.part.facts.geometry, piece.part.facts.layout)
            fits = convert_pages(shape, pages, target.shape, out, piece.heads)
            too_large = f"dtype: a value does not fit {target.shape.geometry.dtype.label}"
            self._note(bad, ["" if good else too_large for good in fits.tolist()], each)
        return out, [bad.get(at // each, "") for at in range(count * each)]

    @staticmethod
    def _note(bad: dict[int, str], reasons: list[str], each: int) -> None:
        """Enter what is wrong with the units that pages belong to; the first reason stays."""
        for at, why in enumerate(reasons):
            if why:
                bad.setdefault(at // each, why)

    def _pages(
        self, part: ArchivePart, numbers: NDArray[np.int64], keys: list[bytes]
    ) -> tuple[NDArray[np.uint8], list[str]]:
        """Read pages of one part, -1 where it does not have one; return them and what is wrong with each."""
        pages = self._memory("in", len(numbers), part.facts.geometry.page_nbytes)
        there = np.flatnonzero(numbers >= 0)
        if len(there) == len(numbers):
            return pages, part.read_pages(numbers, pages, keys)
        some = np.empty((len(there), pages.shape[1]), np.uint8)
        found = part.read_pages(numbers[there], some, [keys[at] for at in there.tolist()])
        pages[there] = some
        reasons = [f"rank: {part.facts.name.rank} does not have the page"] * len(numbers)
        for at, why in zip(there.tolist(), found, strict=True):
            reasons[at] = why
        return pages, reasons

    def _memory(self, name: str, pages: int, page_nbytes: int) -> NDArray[np.uint8]:
        held: NDArray[np.uint8] | None = getattr(self._local, name, None)
        if held is None or held.size < pages * page_nbytes:
            held = np.empty(pages * page_nbytes, np.uint8)
            setattr(self._local, name, held)
        return held[: pages * page_nbytes].reshape(pages, page_nbytes)
