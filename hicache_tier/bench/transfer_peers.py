"""What transfers are compared with besides C: a loop of `cudaMemcpyAsync` over the same fragments."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from hicache_tier_kernels import Support

from .errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from hicache_tier_kernels import RowMap

    from .transfer_cases import TransferCase
    from .transfer_rig import Move, Rig

    Fragments = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
    """Addresses of sources and destinations, and bytes."""

MOST_FRAGMENTS = 16384
_SETS = 2


class Peer(Protocol):
    """Someone else's way to move the same pages."""

    name: str
    repeats: int

    def trim(self, rig: Rig, sets: list[list[Move]]) -> tuple[list[list[Move]], float]:
        """Return the moves to time, and which share of the bytes they are."""

    def supports(self, rig: Rig, case: TransferCase) -> Support:
        """Return whether it can run a case, or why not."""

    def prepare(self, rig: Rig, case: TransferCase, sets: list[list[Move]]) -> Callable[[int], None]:
        """Return what submits one set, by its number, on the current stream."""


class MemcpyLoop:
    """One `cudaMemcpyAsync` a fragment, submitted one by one from Python without releasing its lock.

    A call costs about 0.5 us more than from C, which shows below 16 KiB. Neighbouring fragments are merged.
    At most 16,384 fragments are timed: the rate does not depend on how many follow.
    """

    name = "memcpy-loop"
    repeats = 3

    def __init__(self) -> None:
        self._copy = _memcpy_async()

    def trim(self, rig: Rig, sets: list[list[Move]]) -> tuple[list[list[Move]], float]:
        """Keep as many pages as have few enough fragments."""
        pages = len(sets[0][0].host_pages)
        fragments = sum(len(fragments_of(rig, move)[0]) for move in sets[0])
        keep = min(pages, max(1, pages * MOST_FRAGMENTS // fragments))
        cut = [
            [
                replace(move, device_pages=move.device_pages[:keep], host_pages=move.host_pages[:keep])
                for move in moves
            ]
            for moves in sets[:_SETS]
        ]
        return cut, keep / pages

    def supports(self, rig: Rig, case: TransferCase) -> Support:
        """Everything that one stream can do."""
        if rig.device.device.type != "cuda":
            return Support(ok=False, reason="needs a CUDA device")
        if len(case.direction.moves) > 1:
            return Support(ok=False, reason="a loop submits one copy after the other")
        return Support(ok=True)

    def prepare(self, rig: Rig, case: TransferCase, sets: list[list[Move]]) -> Callable[[int], None]:
        """List the fragments of every set."""
        del case
        kinds = {"load": 1, "backup": 2}  # cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost
        calls = []
        for moves in sets:
            parts = [
                (dst, src, nbytes, kinds[move.op])
                for move in moves
                for src, dst, nbytes in zip(*(a.tolist() for a in fragments_of(rig, move)), strict=True)
            ]
            calls.append(parts)

        def submit(turn: int) -> None:
            stream, copy = torch.cuda.current_stream().cuda_stream, self._copy
            for dst, src, nbytes, kind in calls[turn % len(calls)]:
                code = copy(dst, src, nbytes, kind, stream)
                if code:
                    raise BenchError(f"cudaMemcpyAsync failed with error {code}")

        return submit


def fragments_of(rig: Rig, move: Move) -> Fragments:
    """Return the fragments of a move, longest possible: neighbours on both sides are one.

    None crosses from one pinned range of the host pool into the next.
    """
    sides = [
        (rig.device.row_map(), move.device_pages.numpy()),
        (rig.host.row_map(), move.host_pages.numpy()),
    ]
    if move.op == "load":
        sides.reverse()
    seams = np.array([rig.host.address + offset for offset, _ in rig.host.chunks], np.int64)
    found = [_plane_fragments(sides, plane) for plane in range(len(sides[0][0].planes))]
    merged = [_merge(*fragments, seams, host=int(move.op == "backup")) for fragments in found]
    sources, destinations, nbytes = (np.concatenate(arrays) for arrays in zip(*merged, strict=True))
    return sources, destinations, nbytes


def _plane_fragments(sides: list[tuple[RowMap, NDArray[np.int64]]], plane: int) -> Fragments:
    views = [(row_map.planes[plane], pages) for row_map, pages in sides]
    pieces = max(view.shape[2] for view, _ in views)
    nbytes = views[0][0].shape[2] * views[0][0].shape[3] // pieces
    addresses = []
    for view, pages in views:
        piece = view.stride(2) if view.shape[2] == pieces else nbytes
        grid = (
            pages[:, None, None] * view.stride(0)
            + np.arange(view.shape[1])[None, :, None] * view.stride(1)
            + np.arange(pieces)[None, None, :] * piece
        )
        addresses.append(view.data_ptr() + grid.ravel())
    return addresses[0], addresses[1], np.full(len(addresses[0]), nbytes, np.int64)


def _merge(
    source: NDArray[np.int64],
    destination: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    seams: NDArray[np.int64],
    *,
    host: int,
) -> Fragments:
    """Join fragments that follow each other on both sides; `host` says which side seams count for."""
    ends = [side[:-1] + nbytes[:-1] == side[1:] for side in (source, destination)]
    chunk = np.searchsorted(seams, (source, destination)[host], side="right")
    joined = ends[0] & ends[1] & (chunk[:-1] == chunk[1:])
    first = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    return source[first], destination[first], np.add.reduceat(nbytes, first)


def _memcpy_async() -> Any:  # noqa: ANN401 - a foreign function
    """Return the function of the runtime that torch has loaded; calling it keeps Python's lock."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [line.split()[-1] for line in lines if "libcudart" in line]
    if not paths:
        raise BenchError("the CUDA runtime is not loaded; memcpy-loop needs torch with CUDA.")
    function = ctypes.PyDLL(paths[0]).cudaMemcpyAsync
    function.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
    )  # fmt: skip
    function.restype = ctypes.c_int
    return function
