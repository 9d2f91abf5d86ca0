"""Device pools whose pages tests read and write as bytes in stored order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hicache_tier.device_pool import DevicePool
from hicache_tier.layout import Layout
from hicache_tier_kernels import CopyPlan, run_reference
from hicache_tier_storage.slot_map import slot_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_tier.geometry import KVGeometry

_ALIGNMENT = 4096


class BytePool(DevicePool):
    """A device pool whose tensors start at multiples of 4096, so that its fragments may move one by one.

    Parameters
    ----------
    geometry : KVGeometry
    layout : Layout or str
        The order of axes in which tests see pages.
    num_pages : int
    device : torch.device or str
    owned_layers : sequence of int, optional
    gap : int
        Elements between rows.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        layout: Layout | str,
        num_pages: int,
        device: torch.device | str = "cpu",
        owned_layers: Sequence[int] | None = None,
        *,
        gap: int = 0,
    ) -> None:
        owned = range(geometry.num_layers) if owned_layers is None else owned_layers
        like = DevicePool.empty(geometry.with_layers(1), num_pages).layers[0]
        shapes = [part.shape for part in (like if isinstance(like, tuple) else (like,))]
        layers = []
        for _ in owned:
            tensors = tuple(_aligned(shape, geometry.dtype.torch, device, gap) for shape in shapes)
            layers.append(tensors if len(tensors) > 1 else tensors[0])
        super().__init__(geometry, layers, owned_layers)
        self.layout = Layout.parse(layout)

    def write_page(self, page: int, data: bytes) -> None:
        """Put a page's bytes, in stored order, where the pool has them."""
        self._copy(page, torch.frombuffer(bytearray(data), dtype=torch.uint8), write=True)

    def read_page(self, page: int) -> bytes:
        """Return a page's bytes in stored order."""
        data = torch.zeros(self.local_geometry.page_nbytes, dtype=torch.uint8)
        self._copy(page, data, write=False)
        return bytes(data.numpy())

    def _copy(self, page: int, data: torch.Tensor, *, write: bool) -> None:
        stored = slot_map(data, self.local_geometry, self.layout, data.nbytes)
        zero, number = torch.zeros(1, dtype=torch.int64), torch.tensor([int(page)])
        sides = (stored, self.row_map(), zero, number) if write else (self.row_map(), stored, number, zero)
        run_reference(CopyPlan(*sides))


def _aligned(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, gap: int) -> torch.Tensor:
    rows, width = shape[0], int(torch.Size(shape[1:]).numel())
    nbytes = rows * (width + gap) * dtype.itemsize
    raw = torch.zeros(nbytes + _ALIGNMENT, dtype=torch.uint8, device=device)
    skew = -raw.data_ptr() % _ALIGNMENT
    spaced = raw[skew : skew + nbytes].view(dtype).view(rows, width + gap)
    return spaced[:, :width].view(tuple(shape))
