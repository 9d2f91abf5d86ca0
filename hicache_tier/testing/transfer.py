"""Conformance suite for copy engines: subclass `CopyEngineSuite` and say how to run a plan.

Pytest does the rest::

    class TestMine(CopyEngineSuite):
        device = "cuda"

        def run(self, plan):
            mine.run(plan)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from hicache_tier.device_pool import DevicePool
from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool
from hicache_tier.layout import Layout
from hicache_tier_kernels import CopyPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

GEOMETRIES = {
    "gqa": KVGeometry.mha(num_layers=3, num_kv_heads=2, head_dim=64, dtype="bfloat16", page_tokens=4),
    "k_wider_than_v": KVGeometry.mha(
        num_layers=2, num_kv_heads=2, head_dim=192, v_head_dim=128, dtype="float16", page_tokens=4
    ),
    "odd_width": KVGeometry.mha(num_layers=2, num_kv_heads=3, head_dim=7, dtype="int8", page_tokens=2),
    "mla_bf16_1152": KVGeometry.mla(num_layers=2, latent_dim=576, dtype="bfloat16", page_tokens=4),
    "mla_fp8_576": KVGeometry.mla(num_layers=2, latent_dim=576, dtype="float8_e4m3fn", page_tokens=4),
    "dsa_fp8_656": KVGeometry.mla(num_layers=3, latent_dim=656, dtype="uint8", page_tokens=4),
    "page_of_one": KVGeometry.mla(num_layers=2, latent_dim=576, dtype="float8_e5m2", page_tokens=1),
    "indexer_132": KVGeometry.indexer(num_layers=3, bytes_per_token=132, page_tokens=4),
}
CASES = [
    pytest.param(geometry, layout, id=f"{name}-{layout.value}")
    for name, geometry in GEOMETRIES.items()
    for layout in Layout
    if not layout.why_not(geometry.kind)
]
PAGES = 9


class CopyEngineSuite:
    """What every engine that runs a `CopyPlan` must do, bit by bit.

    Attributes
    ----------
    device : str
        Device of the device pool.
    pinned : bool
        Whether the host pool must be pinned.
    """

    device: ClassVar[str] = "cpu"
    pinned: ClassVar[bool] = False

    def run(self, plan: CopyPlan) -> None:
        """Run a plan and return when its bytes have arrived."""
        raise NotImplementedError

    @pytest.mark.parametrize(("geometry", "layout"), CASES)
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
    def test_backup_moves_these_pages_and_no_other_byte(
        self, geometry: KVGeometry, layout: Layout, dtype: torch.dtype
    ) -> None:
        device, host = self._pools(geometry, layout)
        with host:
            self._check(device, host, [8, 2, 5, 0], [3, 8, 0, 7], dtype, to_host=True)

    @pytest.mark.parametrize(("geometry", "layout"), CASES)
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
    def test_load_moves_these_pages_and_no_other_byte(
        self, geometry: KVGeometry, layout: Layout, dtype: torch.dtype
    ) -> None:
        device, host = self._pools(geometry, layout)
        with host:
            self._check(device, host, [3, 4, 5, 8], [8, 7, 6, 1], dtype, to_host=False)

    @pytest.mark.parametrize(("geometry", "layout"), CASES)
    def test_one_source_page_to_many(self, geometry: KVGeometry, layout: Layout) -> None:
        device, host = self._pools(geometry, layout)
        with host:
            self._check(device, host, [8] * PAGES, list(range(PAGES)), torch.int64, to_host=False)

    @pytest.mark.parametrize(("geometry", "layout"), CASES)
    def test_no_page_is_no_work(self, geometry: KVGeometry, layout: Layout) -> None:
        device, host = self._pools(geometry, layout)
        with host:
            self._check(device, host, [], [], torch.int64, to_host=True)

    @pytest.mark.parametrize(("geometry", "layout"), CASES)
    def test_some_planes_only(self, geometry: KVGeometry, layout: Layout) -> None:
        device, host = self._pools(geometry, layout)
        last = [geometry.num_layers * (i + 1) - 1 for i in range(len(geometry.components))]
        with host:
            self._check(device, host, [1, 2], [6, 5], torch.int64, to_host=False, planes=last)

    @pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.value)
    def test_device_rows_further_apart_than_their_width(self, layout: Layout) -> None:
        geometry = GEOMETRIES["gqa"]
        wide = torch.zeros((PAGES * 4, 3 * 2 * 2, 80), dtype=torch.bfloat16, device=self.device)
        layers = [(wide[:, 4 * i : 4 * i + 2, :64], wide[:, 4 * i + 2 : 4 * i + 4, :64]) for i in range(3)]
        layers = [(_packed_heads(k), _packed_heads(v)) for k, v in layers]
        device = DevicePool(geometry, layers)
        with HostPool(geometry, layout, PAGES, pinned=self.pinned) as host:
            self._check(device, host, [1, 8], [8, 1], torch.int64, to_host=True)
            self._check(device, host, [1, 8], [8, 1], torch.int64, to_host=False)

    def _pools(self, geometry: KVGeometry, layout: Layout) -> tuple[DevicePool, HostPool]:
        device = DevicePool.empty(geometry, PAGES, device=self.device)
        return device, HostPool(geometry, layout, PAGES, pinned=self.pinned)

    def _check(
        self,
        device: DevicePool,
        host: HostPool,
        sources: list[int],
        destinations: list[int],
        dtype: torch.dtype,
        *,
        to_host: bool,
        planes: Sequence[int] | None = None,
    ) -> None:
        """Fill both pools with noise, run, and compare the destination with a copy made page by page."""
        generator = torch.Generator().manual_seed(len(sources))
        for plane in (*device.row_map().planes, *host.row_map().planes):
            noise = torch.randint(0, 256, plane.shape, dtype=torch.uint8, generator=generator)
            plane.copy_(noise)
        maps = [device.row_map(), host.row_map()]
        source, destination = maps if to_host else maps[::-1]
        if planes is not None:
            source, destination = source.select(planes), destination.select(planes)
        whole = host.row_map() if to_host else device.row_map()
        chosen = range(len(whole.planes)) if planes is None else planes
        expected = [_flat_rows(plane).clone() for plane in whole.planes]
        for number, plane in zip(chosen, source.planes, strict=True):
            rows = _flat_rows(plane)
            for ours, theirs in zip(sources, destinations, strict=True):
                expected[number][theirs] = rows[ours]
        indices = (torch.tensor(sources, dtype=dtype), torch.tensor(destinations, dtype=dtype))
        self.run(CopyPlan(source, destination, *indices))
        for number, plane in enumerate(whole.planes):
            assert torch.equal(_flat_rows(plane), expected[number]), f"plane {number} differs"


def _flat_rows(plane: torch.Tensor) -> torch.Tensor:
    """Return `[pages, rows, row_nbytes]` on the CPU; a copy where the plane splits rows."""
    return plane.cpu().flatten(2)


def _packed_heads(view: torch.Tensor) -> torch.Tensor:
    """Return rows of two heads of 64 side by side in the room that `view` has, rows as far apart as there."""
    return view.as_strided((view.shape[0], 2, 64), (view.stride(0), 64, 1), view.storage_offset())
