"""Pools that transfers are measured in, and the check that bytes went where they should, nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from hicache_tier.device_pool import DevicePool
from hicache_tier.host_pool import HostPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache_tier.geometry import KVGeometry

    from .transfer_cases import TransferCase

_RUN = 8
_LEAST_SETS = 6
"""An engine hardly asks for the same pages twice in a row, so neither does the benchmark."""
_STEP_NBYTES = 256 << 20
_CANONICAL = "plthd"


@dataclass(frozen=True, slots=True)
class Move:
    """Pages that go one way, one to one; int64 on the CPU."""

    op: str
    device_pages: torch.Tensor
    host_pages: torch.Tensor


class Rig:
    """A device pool and a host pool of the same geometry, with more pages than move at once.

    Parameters
    ----------
    geometry : KVGeometry
    layout : str
    pages : int
        Most pages that move at once; an eighth more are there.
    device : torch.device
    buffer_nbytes : int
        Least bytes of each pool, so that repeated transfers come from memory and not from a cache.
    """

    def __init__(
        self, geometry: KVGeometry, layout: str, pages: int, device: torch.device, buffer_nbytes: int
    ) -> None:
        self.geometry = geometry
        wanted = max(pages, -(-buffer_nbytes // geometry.page_nbytes))
        total = -(-(wanted + wanted // 8 + 1) // _RUN) * _RUN
        self.device = DevicePool.empty(geometry, total, device=device)
        self.host = HostPool(geometry, layout, total)
        self._generator = torch.Generator().manual_seed(20261129)

    @classmethod
    def for_cases(cls, cases: list[TransferCase], device: torch.device, buffer_nbytes: int) -> Self:
        """Make the pools that cases share."""
        most = max(case.pages * len(case.direction.moves) for case in cases)
        return cls(cases[0].kv_geometry, cases[0].layout, most, device, buffer_nbytes)

    def moves(self, case: TransferCase) -> list[list[Move]]:
        """Return sets of moves to take in turn."""
        return self.page_sets(case.pages, case.direction.moves, case.order)

    def page_sets(self, count: int, ops: tuple[str, ...], order: str) -> list[list[Move]]:
        """Return several sets of one move for each of `ops`.

        The pages of no two moves of a set overlap, nor those of two sets where the pools have pages for that;
        else further sets pair the same pages anew.

        Parameters
        ----------
        count : int
            Pages of a move.
        ops : tuple[str, ...]
            `backup`, `load`.
        order : str
            `random`, or `runs` of eight consecutive pages in random order.
        """
        pages = self._random_pages if order == "random" else self._pages_in_runs
        ours, theirs = pages(), pages()
        sets = []
        for first in range(0, len(ours) - count * len(ops) + 1, count * len(ops)):
            parts = [slice(first + i * count, first + (i + 1) * count) for i in range(len(ops))]
            sets.append([Move(op, ours[part], theirs[part]) for op, part in zip(ops, parts, strict=True)])
        for number in range(_LEAST_SETS - len(sets)):
            sets.append([self._paired_anew(move, order) for move in sets[number]])
        return sets

    def _paired_anew(self, move: Move, order: str) -> Move:
        run = _RUN if order == "runs" and len(move.host_pages) % _RUN == 0 else 1
        count = len(move.host_pages) // run
        ours, theirs = (
            pages.view(count, run)[torch.randperm(count, generator=self._generator)].flatten()
            for pages in (move.device_pages, move.host_pages)
        )
        return Move(move.op, ours, theirs)

    def fragment_nbytes(self) -> int:
        """Return the bytes of the shortest run that lies in one piece on both sides."""
        sides = self.device.row_map(), self.host.row_map()
        shortest = []
        for planes in zip(*(side.planes for side in sides), strict=True):
            pieces = max(plane.shape[2] for plane in planes)
            if pieces > 1:
                shortest.append(planes[0].shape[2] * planes[0].shape[3] // pieces)
            elif all(plane.stride(1) == plane.shape[3] or plane.shape[1] == 1 for plane in planes):
                shortest.append(planes[0].shape[1] * planes[0].shape[3])
            else:
                shortest.append(planes[0].shape[3])
        return int(min(shortest))

    def check(self, moves: list[Move], run: Callable[[], None]) -> bool:
        """Fill both pools with noise, run, and compare every byte of both with what must be there.

        What is expected is made from the layout's order of axes, without row maps or copy plans. `run` must
        return when its bytes have arrived. Both pools hold random bytes afterwards.
        """
        before = self._noise()
        rows = [self._device_rows(layer) for layer in range(len(self.device.layers))]
        kept = [[part.clone() for part in parts] for parts in rows]
        run()
        after = self._host_bytes()
        same = True
        for layer, parts in enumerate(rows):
            for component, part in enumerate(parts):
                ours = kept[layer][component]
                theirs = self._host_rows(before, component, layer)
                want_ours, want_theirs = ours.clone(), theirs.contiguous()
                for move in moves:
                    near = move.device_pages.to(part.device)
                    far = move.host_pages.to(part.device)
                    if move.op == "backup":
                        want_theirs[far] = ours[near]
                    else:
                        want_ours[near] = theirs[far]
                same &= torch.equal(want_ours, part)
                same &= torch.equal(want_theirs, self._host_rows(after, component, layer))
        return same

    def _random_pages(self) -> torch.Tensor:
        return torch.randperm(self.host.num_pages, generator=self._generator)

    def _pages_in_runs(self) -> torch.Tensor:
        starts = torch.randperm(self.host.num_pages // _RUN, generator=self._generator) * _RUN
        return (starts[:, None] + torch.arange(_RUN)).flatten()

    def _noise(self) -> list[torch.Tensor]:
        """Fill both pools with random bytes and return those of the host, by component, on the device."""
        for layer in range(len(self.device.layers)):
            for part in self._device_rows(layer):
                fill_random(part.view(-1))
        noise = []
        for component, region in enumerate(self._host_regions()):
            bytes_ = torch.empty(len(region), dtype=torch.uint8, device=self.device.device)
            fill_random(bytes_)
            for piece in self._pieces(component):
                region[piece].copy_(bytes_[piece])
            noise.append(bytes_)
        return noise

    def _host_bytes(self) -> list[torch.Tensor]:
        """Return a copy of the host pool, by component, on the device."""
        copies = []
        for component, region in enumerate(self._host_regions()):
            copy = torch.empty(len(region), dtype=torch.uint8, device=self.device.device)
            for piece in self._pieces(component):
                copy[piece].copy_(region[piece])
            copies.append(copy)
        return copies

    def _host_regions(self) -> list[torch.Tensor]:
        return [
            self.host.component_tensor(component.name).view(torch.uint8).view(-1)
            for component in self.geometry.components
        ]

    def _pieces(self, component: int) -> Iterator[slice]:
        """Cut a component's region where the pinned ranges end: CUDA refuses a copy across."""
        region = self._host_regions()[component]
        first = region.data_ptr() - self.host.address
        for start, nbytes in self.host.chunks:
            low, high = max(start - first, 0), min(start + nbytes - first, len(region))
            for at in range(low, high, _STEP_NBYTES):
                yield slice(at, min(at + _STEP_NBYTES, high))

    def _device_rows(self, layer: int) -> list[torch.Tensor]:
        """Return the components of one layer as bytes `[pages, rows, heads, width]`."""
        tensors = self.device.layers[layer]
        parts = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
        return [
            part.view(torch.uint8).view(self.device.num_pages, self.geometry.rows, component.heads, -1)
            for part, component in zip(parts, self.geometry.components, strict=True)
        ]

    def _host_rows(self, copies: list[torch.Tensor], component: int, layer: int) -> torch.Tensor:
        """Return one layer of one component, in the same order of axes as the device's."""
        layout, part = self.host.layout, self.geometry.components[component]
        shape = layout.host_shape(self.geometry, part, self.host.num_pages)
        axes = layout.host_axes
        whole = copies[component].view(*shape[:-1], -1)
        return whole.permute([axes.index(axis) for axis in _CANONICAL])[:, layer]

    def close(self) -> None:
        """Give the host memory back."""
        self.host.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fill_random(flat: torch.Tensor) -> None:
    """Fill contiguous bytes with random ones, eight at a time where they come in eights."""
    if len(flat) % 8 == 0 and flat.data_ptr() % 8 == 0:
        flat.view(torch.int64).random_(-(1 << 63), None)
    else:
        flat.random_(0, 256)
