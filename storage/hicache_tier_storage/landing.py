"""Reads that their caller may walk away from: to memory of the store's own, then to the caller's pages."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .engine import PageBatch, moved

if TYPE_CHECKING:
    from .engine import ByteEngine
    from .lease import Lease

ABANDONED = "abandoned"


@dataclass(slots=True)
class LeasedBatch(PageBatch):
    """A batch whose memory is the engine's only as long as it holds the lease.

    Given to engines that have an attribute `lands`, true. They read to memory of their own, and enter the
    lease to copy from there and to call the hook. A page that it did not let in is `abandoned`.

    Attributes
    ----------
    lease : Lease, optional
    """

    lease: Lease | None = None


def read_leased(engine: ByteEngine, batch: LeasedBatch) -> list[str]:
    """Let an engine read a leased batch; one that does not know of leases by way of other memory."""
    lease = batch.lease
    if lease is None or getattr(engine, "lands", False):
        return moved(engine, batch, write=False)
    landing = _landing(batch)
    reasons = moved(engine, landing, write=False)
    lengths = batch.nbytes.tolist()
    for page, (source, segments) in enumerate(
        zip(landing.addresses[:, 0].tolist(), batch.addresses.tolist(), strict=True)
    ):
        if reasons[page]:
            continue
        if not lease.enter():
            reasons[page] = ABANDONED
            continue
        try:
            _scatter(source, segments, lengths)
            if batch.hook:
                batch.hook(page, page + 1)
        finally:
            lease.leave()
    return reasons


class _Landing(PageBatch):
    """A batch that keeps its memory mapped as long as the engine may write to it."""

    memory_map: mmap.mmap


def _landing(batch: PageBatch) -> PageBatch:
    """Return the batch with pages of its own, each in one run that starts at a multiple of 4096."""
    memory = mmap.mmap(-1, max(1, len(batch)) * batch.stride)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    rows = np.uint64(first) + np.arange(len(batch), dtype=np.uint64)[:, None] * np.uint64(batch.stride)
    nbytes = np.array([batch.page_nbytes], np.uint64)
    landing = _Landing(batch.files, batch.offsets, rows, nbytes, batch.page_nbytes, batch.stride)
    landing.memory_map = memory
    return landing


def _scatter(source: int, segments: list[int], lengths: list[int]) -> None:
    for address, length in zip(segments, lengths, strict=True):
        ctypes.memmove(address, source, length)
        source += length
