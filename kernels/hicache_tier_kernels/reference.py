"""The reference engine: torch alone, CPU and CUDA alike. It defines what a correct copy is.

Bytes are moved as the widest integers that sizes, strides and alignment of both sides allow, so that every
dtype (fp8 among them) takes the same way. There is no Python loop over pages or tokens: each plane is
gathered and scattered by index, in chunks that bound the staging memory.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .plan import CopyPlan

STAGING_NBYTES = 8 << 20
"""Most bytes staged at once for one plane (but at least one page)."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def run_reference(plan: CopyPlan, planes: Iterable[int] | None = None) -> None:
    """Carry out `plan`; complete on return, on CUDA too.

    Parameters
    ----------
    plan : CopyPlan
        Source and destination may be on different devices: pages are gathered on the source's device,
        moved, and scattered on the destination's.
    planes : iterable of int, optional
        Copy only these planes (those of one layer, say); all where left out.
    """
    if not plan.count:
        return
    plan = plan.on_host()
    ours, theirs = plan.source.device, plan.destination.device
    # Engines allocate their caches in inference mode; such tensors can only be written inside it.
    with torch.inference_mode():
        source_pages = plan.source_pages.to(ours, torch.int64)
        destination_pages = plan.destination_pages.to(theirs, torch.int64)
        for plane in range(len(plan.source.planes)) if planes is None else planes:
            source, destination = plan.source.planes[plane], plan.destination.planes[plane]
            _copy_plane(source, destination, source_pages, destination_pages)
    for device in {ours, theirs}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _copy_plane(
    source: torch.Tensor,
    destination: torch.Tensor,
    source_pages: torch.Tensor,
    destination_pages: torch.Tensor,
) -> None:
    pieces = max(source.shape[2], destination.shape[2])
    source, destination = _split_rows(source, pieces), _split_rows(destination, pieces)
    word = _WORDS[gcd(_alignment(source), _alignment(destination))]
    source, destination = source.view(word), destination.view(word)
    step = max(1, STAGING_NBYTES // source[0].nbytes)
    for start in range(0, len(source_pages), step):
        chunk = slice(start, start + step)
        staged = source.index_select(0, source_pages[chunk]).to(destination.device)
        destination.index_copy_(0, destination_pages[chunk], staged)


def _split_rows(plane: torch.Tensor, pieces: int) -> torch.Tensor:
    """Return the plane with its whole rows seen as `pieces` pieces; nothing to do where it has them."""
    if plane.shape[2] == pieces:
        return plane
    nbytes = plane.shape[3] // pieces
    shape = (*plane.shape[:2], pieces, nbytes)
    return plane.as_strided(shape, (*plane.stride()[:2], nbytes, 1), plane.storage_offset())


def _alignment(plane: torch.Tensor) -> int:
    """Return the widest word, of 8, 4, 2 and 1 bytes, that divides everything about the plane."""
    return gcd(8, plane.data_ptr(), plane.storage_offset(), plane.shape[3], *plane.stride()[:3])
