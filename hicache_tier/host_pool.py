"""Pages of KV in host memory."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

import numpy as np

from hicache_tier_kernels import RowMap, byte_plane

from .allocator import PageAllocator, page_array
from .errors import ClosedError, InvalidArgumentError, not_known
from .geometry import KVGeometry, positive
from .layout import Layout
from .memory import HostMemory, check_budget
from .pinning import CHUNK_NBYTES, PAGE_NBYTES, chunks_of, human
from .sharding import layer_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from .memory import MemoryLimit, Pinning
    from .pinning import Chunk, Registrar

log = logging.getLogger(__name__)


class HostPool:
    """`num_pages` pages of one geometry in one layout, in page-aligned memory, pinned where there is CUDA.

    Components lie one after another, each region starting at a multiple of 4096 bytes. Memory starts as
    zeros and is not touched before it is used (pinning touches it).

    Parameters
    ----------
    geometry : KVGeometry
        Of the whole model; with `owned_layers` the pool holds only those of its layers.
    layout : Layout or str
    num_pages : int
    pinned : bool or "auto"
        Register the memory with CUDA: `True` raises where that fails, `"auto"` warns and goes on with
        plain memory (silently but for a log line where there is no device), `False` does not try.
    owned_layers : sequence of int, optional
        Global numbers of the layers to hold, ascending.
    limits : sequence of MemoryLimit, optional
        What bounds the pool; read from the host and the cgroup where left out.
    registrar : Registrar, optional
        Who pins memory; CUDA where left out.
    chunk_nbytes : int
        Most bytes pinned in one call. Seams lie between fragments of pages: CUDA refuses a copy that
        crosses one, so copies of whole pages and fragments never do; merged ones must be cut there.

    Attributes
    ----------
    geometry : KVGeometry
        Of what the pool holds.
    layout : Layout
    num_pages : int
    owned_layers : tuple[int, ...] or None
        As given.
    total_layers : int
        Layers of the geometry given.
    page_nbytes : int
        Bytes of one page.
    nbytes : int
        Bytes mapped, a little more than `num_pages * page_nbytes` where regions are padded.
    pinned : bool
        Whether the memory is registered.
    chunks : tuple[tuple[int, int], ...]
        Offsets from `address` and lengths that are registered one by one where pinned.

    Raises
    ------
    MemoryBudgetError
        Where it would not fit the host or its cgroup; no memory was touched.
    InvalidArgumentError
        For a layout that the geometry cannot have, and any other wrong argument.
    EngineUnavailableError
        Where `pinned=True` cannot be had.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        layout: Layout | str,
        num_pages: int,
        pinned: Pinning = "auto",
        owned_layers: Sequence[int] | None = None,
        *,
        limits: Sequence[MemoryLimit] | None = None,
        registrar: Registrar | None = None,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> None:
        if not isinstance(geometry, KVGeometry):
            raise InvalidArgumentError(f"geometry must be a KVGeometry, got {type(geometry).__name__}.")
        self.layout = Layout.parse(layout)
        unfit = self.layout.why_not(geometry.kind)
        if unfit:
            raise InvalidArgumentError(f"{unfit}; choose another layout.")
        self.num_pages = positive("num_pages", num_pages)
        self.total_layers = geometry.num_layers
        self.owned_layers: tuple[int, ...] | None = None
        if owned_layers is not None:
            self.owned_layers = layer_numbers(owned_layers, geometry.num_layers)
            geometry = geometry.with_layers(len(self.owned_layers))
        self.geometry = geometry
        self.page_nbytes = geometry.page_nbytes
        self._region_offsets, total = _regions(geometry, self.num_pages)
        check_budget(total, limits)
        fragments = self.layout.fragments(geometry, self.num_pages)
        units = {fragment.component: fragment.nbytes for fragment in fragments}
        ends = (*self._region_offsets[1:], total)
        most = positive("chunk_nbytes", chunk_nbytes)
        self.chunks: tuple[Chunk, ...] = tuple(
            chunk
            for index, (start, end) in enumerate(zip(self._region_offsets, ends, strict=True))
            for chunk in chunks_of(start, end - start, units[index], most)
        )
        self._memory = HostMemory(total, pinned, registrar, self.chunks)
        self.nbytes = self._memory.nbytes
        self.pinned = self._memory.pinned
        self._allocator = PageAllocator(self.num_pages)
        self._users = 0
        self._closed = False
        self._idle = threading.Condition()
        base = self._memory.address
        first = [base + self._region_offsets[f.component] + f.offset for f in fragments]
        self._first_addresses = np.array(first, dtype=np.int64)
        self._page_strides = np.array([f.page_stride for f in fragments], dtype=np.int64)
        self._fragment_nbytes = np.array([f.nbytes for f in fragments], dtype=np.int64)
        self._fragment_nbytes.flags.writeable = False
        self._row_map: RowMap | None = None

    @property
    def address(self) -> int:
        """Address of the first byte, a multiple of 4096."""
        self._check_open()
        return self._memory.address

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated."""
        return self._allocator.free_pages

    @property
    def owned_pages(self) -> int:
        """Pages that are allocated; with `free_pages` always `num_pages`."""
        return self._allocator.owned_pages

    def alloc(self, n: int, owner: str | None = None) -> torch.Tensor | None:
        """Take `n` pages, consecutive ones where possible.

        Returns
        -------
        torch.Tensor or None
            int64 `[n]`, ascending; None where fewer are free.
        """
        self._check_open()
        return self._allocator.alloc(n, owner)

    def free(self, pages: object, owner: str | None = None) -> None:
        """Give pages back; raises `DoubleFreeError` naming both owners where one is free already."""
        self._check_open()
        self._allocator.free(pages, owner)

    def hold(self, pages: object) -> None:
        """Give these pages to nobody else, even after they are freed, until `let_go`.

        A store does so with pages that a call which missed its deadline may still write to.
        """
        self._allocator.hold(pages)

    def let_go(self, pages: object) -> None:
        """Undo one `hold` of each page; those that were freed meanwhile can be allocated again."""
        self._allocator.let_go(pages)

    def component_tensor(self, name: str) -> torch.Tensor:
        """Return one component of all pages, in `layout.host_shape`, without a copy."""
        self._check_open()
        for component, offset in zip(self.geometry.components, self._region_offsets, strict=True):
            if component.name == name:
                shape = self.layout.host_shape(self.geometry, component, self.num_pages)
                nbytes = self.geometry.component_nbytes(component) * self.num_pages
                region = self._memory.bytes[offset : offset + nbytes]
                return region.view(self.geometry.dtype.torch).view(shape)
        raise not_known("component", name, [component.name for component in self.geometry.components])

    def page_views(self, page: int) -> dict[str, torch.Tensor]:
        """Return one page as it would be stored, without a copy.

        Returns
        -------
        dict[str, torch.Tensor]
            By component name, in stored order: a view of the logical dtype in `layout.component_shape`
            (strided where the layout scatters a page). Views keep the memory mapped after `close`.
        """
        (number,) = page_array("page", [page], self.num_pages).tolist()
        axis = self.layout.host_axes.index("p")
        return {
            component.name: self.component_tensor(component.name)
            .select(axis, number)
            .view(self.layout.component_shape(self.geometry, component))
            for component in self.geometry.components
        }

    def segment_table(self, pages: object) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where pages lie, for I/O without copies.

        Returns
        -------
        addresses : numpy.ndarray
            int64 `[n, F]`: the address of each of the F contiguous fragments of each page, in stored order.
        nbytes : numpy.ndarray
            int64 `[F]`, read-only: their lengths, the same for all pages.
        """
        self._check_open()
        numbers = page_array("pages", pages, self.num_pages)
        addresses = numbers[:, None] * self._page_strides
        addresses += self._first_addresses
        return addresses, self._fragment_nbytes

    def segments(self, pages: object) -> list[list[tuple[int, int]]]:
        """Return, for each page, (address, nbytes) of its fragments in stored order."""
        addresses, nbytes = self.segment_table(pages)
        lengths = nbytes.tolist()
        return [list(zip(row, lengths, strict=True)) for row in addresses.tolist()]

    def row_map(self) -> RowMap:
        """Return where rows lie: planes by component, then by layer the pool holds."""
        self._check_open()
        found = self._row_map
        if found is None:
            planes = []
            for component, offset in zip(self.geometry.components, self._region_offsets, strict=True):
                steps = self.layout.strides(self.geometry, component, self.num_pages)
                row_nbytes = self.geometry.row_nbytes(component)
                pieces = component.heads if self.layout.splits_rows else 1
                shape = (self.num_pages, self.geometry.rows, pieces, row_nbytes // pieces)
                strides = (steps.page, steps.token, steps.head if pieces > 1 else row_nbytes)
                planes += [
                    byte_plane(self._memory.bytes, offset + layer * steps.layer, shape, strides)
                    for layer in range(self.geometry.num_layers)
                ]
            ranges = tuple((self._memory.address + at, nbytes) for at, nbytes in self.chunks)
            self._row_map = found = RowMap(tuple(planes), ranges if self.pinned else ())
        return found

    @contextmanager
    def in_use(self) -> Iterator[Self]:
        """Keep the memory mapped within the block (I/O in flight); `close` waits for it to end."""
        self.begin_use()
        try:
            yield self
        finally:
            self.end_use()

    def begin_use(self) -> None:
        """Keep the memory mapped until `end_use`, as `in_use` does for a block; raises where it is closed."""
        with self._idle:
            self._check_open()
            self._users += 1

    def end_use(self) -> None:
        """End what one `begin_use` began; any thread may."""
        with self._idle:
            self._users -= 1
            if not self._users:
                self._idle.notify_all()
                if self._closed:
                    self._release()

    def close(self, timeout: float = 10.0) -> bool:
        """Refuse further use, wait for users, and give the memory back.

        Parameters
        ----------
        timeout : float
            Seconds to wait for `in_use` blocks to end. Where they do not, the memory stays mapped, a
            warning is logged, and the last of them releases it.

        Returns
        -------
        bool
            Whether the memory is unmapped now. It is not where a user or a view still holds it.
        """
        deadline = time.monotonic() + timeout
        with self._idle:
            self._closed = True
            while self._users:
                if not self._idle.wait(max(0.0, deadline - time.monotonic())):
                    break
            if self._users:
                log.warning(
                    "%r has %d users after %g s; it stays mapped until they end", self, self._users, timeout
                )
                return False
            return self._release()

    def _release(self) -> bool:
        self._row_map = None
        gone = self._memory.release()
        if not gone:
            log.warning("%r is closed and stays mapped until views of it are gone", self)
        return gone

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} is closed.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.free_pages} free"
        kind = "pinned" if self.pinned else "plain"
        return (
            f"HostPool({self.geometry.kind.value}, {self.layout.value}, {self.num_pages} pages of "
            f"{human(self.page_nbytes)}, {human(self.nbytes)} {kind}, {state})"
        )


def _regions(geometry: KVGeometry, num_pages: int) -> tuple[tuple[int, ...], int]:
    """Return where each component's region starts, and the bytes of all."""
    offsets, total = [], 0
    for component in geometry.components:
        offsets.append(total)
        total += -(-geometry.component_nbytes(component) * num_pages // PAGE_NBYTES) * PAGE_NBYTES
    return tuple(offsets), total
