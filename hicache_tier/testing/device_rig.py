"""Memory of devices for tests: pools whose pages they read and write as bytes, and pages for byte engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hicache_tier.device_pool import DevicePool
from hicache_tier.geometry import KVGeometry
from hicache_tier.layout import Layout
from hicache_tier_kernels import CopyPlan, run_reference
from hicache_tier_storage.device_bytes import own_memory
from hicache_tier_storage.engine import DeviceMemory
from hicache_tier_storage.slot_map import slot_map

from .engine import Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALIGNMENT = 4096
ALIGNED = KVGeometry.mha(num_layers=3, num_kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=16)
"""Each layer's K and V of a page have 4096 bytes."""
GEOMETRIES = {
    "mha": ALIGNED,
    "wide_k": KVGeometry.mha(
        num_layers=2, num_kv_heads=2, head_dim=192, v_head_dim=128, dtype="float16", page_tokens=2
    ),
    "mla": KVGeometry.mla(num_layers=3, latent_dim=72, dtype="float8_e4m3fn", page_tokens=4),
    "indexer": KVGeometry.indexer(num_layers=2, bytes_per_token=132, page_tokens=8),
}


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


class GpuMemory(Memory):
    """Pages on a CUDA device: what tests fill is copied there, what they look at is copied back."""

    def __init__(self, lengths: Sequence[int], pages: int, **options: int) -> None:
        super().__init__(lengths, pages, **options)
        raw = own_memory(self._bytes.size + 2 * _ALIGNMENT, torch.device("cuda", 0))
        skew = (self._bytes.ctypes.data - raw.data_ptr()) % _ALIGNMENT
        self._there = raw[skew : skew + self._bytes.size].view(self._bytes.shape)
        away = self._there.data_ptr() - self._bytes.ctypes.data
        self.addresses = (self.addresses.view(np.int64) + away).view(np.uint64)
        region = (raw.data_ptr(), raw.nbytes)
        self.device = DeviceMemory(0, (region,), self._there)
        self._upload()

    def fill(self) -> None:
        """Write random bytes into every segment."""
        super().fill()
        self._upload()

    def page(self, number: int) -> bytes:
        """Return a page's bytes in stored order."""
        self._download()
        return super().page(number)

    def between_untouched(self) -> bool:
        """Whether the bytes outside all segments are as they were."""
        self._download()
        return super().between_untouched()

    def _upload(self) -> None:
        self._there.copy_(torch.from_numpy(self._bytes))
        torch.cuda.synchronize()

    def _download(self) -> None:
        torch.from_numpy(self._bytes).copy_(self._there)


def _aligned(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, gap: int) -> torch.Tensor:
    rows, width = shape[0], int(torch.Size(shape[1:]).numel())
    nbytes = rows * (width + gap) * dtype.itemsize
    raw = torch.zeros(nbytes + _ALIGNMENT, dtype=torch.uint8, device=device)
    skew = -raw.data_ptr() % _ALIGNMENT
    spaced = raw[skew : skew + nbytes].view(dtype).view(rows, width + gap)
    return spaced[:, :width].view(tuple(shape))
