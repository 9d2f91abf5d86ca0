"""Pages of a transfer that failed, moved one by one with plain calls, for a verdict on each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .engine import PageBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .posix import PosixEngine


def retry(
    plain: PosixEngine, batch: PageBatch, pages: Sequence[int], verdicts: list[str], *, write: bool
) -> None:
    """Move some pages of a batch and set their verdicts.

    The hook runs after a read that succeeds; before a write it ran already.
    """
    hook = batch.hook
    again = list(pages)

    def rows(first: int, last: int) -> None:
        for at in range(first, last):
            if hook is not None:
                hook(again[at], again[at] + 1)

    part = PageBatch(
        [batch.files[at] for at in again],
        batch.offsets[again],
        batch.addresses[again],
        batch.nbytes,
        batch.page_nbytes,
        batch.stride,
        None if write or hook is None else rows,
    )
    reasons = plain.write(part) if write else plain.read(part)
    for at, reason in zip(again, reasons, strict=True):
        verdicts[at] = reason
