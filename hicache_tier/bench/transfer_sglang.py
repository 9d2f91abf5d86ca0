"""SGLang's own copy kernels as a peer, from an installed `sglang` (0.5.23 or later) and `sgl_kernel`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from hicache_tier.geometry import PoolKind
from hicache_tier.layout import Layout
from hicache_tier_kernels import Support

if TYPE_CHECKING:
    from collections.abc import Callable

    from .transfer_cases import TransferCase
    from .transfer_rig import Move, Rig

_KERNELS = "sglang.kernels.ops.kvcache.hicache"
_STAGED_PAGES = 64  # pages of device memory that SGLang's host pools stage a backup through


def missing() -> str | None:
    """Return why SGLang's kernels cannot be had, or None."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if find_spec("sglang") is None:
        return "no package sglang is installed"
    try:
        import_module(_KERNELS)
    except Exception as error:  # noqa: BLE001 - its imports fail in many ways, all of them a reason
        return f"{_KERNELS} cannot be imported ({type(error).__name__}: {error})"
    return None


class SglangKernels:
    """The calls that SGLang's host pools make for `kernel`: one launch a layer to load, one for a backup."""

    name = "sglang"
    repeats = 7

    def __init__(self) -> None:
        self._kernels: Any = import_module(_KERNELS)

    def trim(self, rig: Rig, sets: list[list[Move]]) -> tuple[list[list[Move]], float]:
        """Keep all."""
        del rig
        return sets, 1.0

    def supports(self, rig: Rig, case: TransferCase) -> Support:
        """Ask SGLang."""
        why_not = self._why_not(rig, case)
        return Support(ok=not why_not, reason=why_not)

    def _why_not(self, rig: Rig, case: TransferCase) -> str:
        kind, layout, nbytes = rig.geometry.kind, rig.host.layout, _row_nbytes(rig)
        why_not = ""
        if len(case.direction.moves) > 1:
            why_not = "both directions at once are measured for our engines only"
        elif case.io_backend == "direct":
            why_not = "its direct path is in sgl_kernel; compare with memcpy-loop"
        elif layout not in {Layout.LAYER_FIRST, Layout.PAGE_FIRST} or kind is PoolKind.INDEXER:
            why_not = f"no JIT kernel for {kind.value} in {layout.value}"
        elif not rig.geometry.uniform:
            why_not = "K and V have different widths"
        elif self._staged(rig, case):
            if not self._kernels.can_use_write_back_jit_kernel(element_size=nbytes):
                why_not = f"refuses rows of {nbytes} bytes"
        elif not self._kernels.can_use_hicache_jit_kernel(element_size=nbytes, page_size=case.page_tokens):
            why_not = f"refuses rows of {nbytes} bytes in pages of {case.page_tokens} tokens"
        return why_not

    def prepare(self, rig: Rig, case: TransferCase, sets: list[list[Move]]) -> Callable[[int], None]:
        """Expand pages to token indices on the device, once, as its cache controller does."""
        indices = [(_tokens(rig, move.device_pages), _tokens(rig, move.host_pages)) for (move,) in sets]
        device = [_rows(parts) for parts in rig.device.layers]
        host = _host_rows(rig)
        if case.direction.moves == ("load",):
            return self._loader(device, host, indices, case.page_tokens)
        if self._staged(rig, case):
            return self._staged_backup(rig, device, indices)
        return self._backup(rig, device, host, indices)

    def _loader(
        self,
        device: list[list[torch.Tensor]],
        host: list[list[torch.Tensor]],
        indices: list[tuple[torch.Tensor, torch.Tensor]],
        page_tokens: int,
    ) -> Callable[[int], None]:
        mha = len(device[0]) > 1
        launch = (
            self._kernels.transfer_hicache_one_layer if mha else self._kernels.transfer_hicache_one_layer_mla
        )
        names = (("k_cache_dst", "v_cache_dst"), ("k_cache_src", "v_cache_src"))
        if not mha:
            names = (("cache_dst",), ("cache_src",))  # type: ignore[assignment]

        def submit(turn: int) -> None:
            near, far = indices[turn % len(indices)]
            for ours, theirs in zip(device, host, strict=True):
                given = dict(zip(names[0], ours, strict=True)) | dict(zip(names[1], theirs, strict=True))
                launch(**given, indices_dst=near, indices_src=far, page_size=page_tokens)

        return submit

    def _backup(
        self,
        rig: Rig,
        device: list[list[torch.Tensor]],
        host: list[list[torch.Tensor]],
        indices: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> Callable[[int], None]:
        sources, destinations = _pointers(device, rig), _pointers(host, rig)
        strides = device[0][0].stride(0), host[0][0].stride(0)
        size = _row_nbytes(rig)
        item = device[0][0].element_size()

        def submit(turn: int) -> None:
            near, far = indices[turn % len(indices)]
            common = {
                "indices_dst": far,
                "indices_src": near,
                "element_size": size,
                "page_size": rig.geometry.page_tokens,
            }
            if len(sources) > 1:
                self._kernels.transfer_hicache_all_layer(
                    k_ptr_dst=destinations[0],
                    v_ptr_dst=destinations[1],
                    k_ptr_src=sources[0],
                    v_ptr_src=sources[1],
                    kv_cache_src_stride_bytes=strides[0] * item,
                    kv_cache_dst_stride_bytes=strides[1] * item,
                    **common,
                )
            else:
                self._kernels.transfer_hicache_all_layer_mla(
                    ptr_dst=destinations[0],
                    ptr_src=sources[0],
                    cache_src_stride_bytes=strides[0] * item,
                    cache_dst_stride_bytes=strides[1] * item,
                    **common,
                )

        return submit

    def _staged_backup(
        self, rig: Rig, device: list[list[torch.Tensor]], indices: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> Callable[[int], None]:
        sources = _pointers(device, rig)
        chosen = [(near, far.cpu()) for near, far in indices]  # its DMA is submitted page by page
        targets = []
        for component in rig.geometry.components:
            whole = rig.host.component_tensor(component.name)
            targets.append(whole.view(-1, rig.geometry.num_layers, component.heads, component.width))
        rows = min(rig.host.num_pages, _STAGED_PAGES) * rig.geometry.page_tokens
        staging = [
            torch.empty((rows, *target.shape[1:]), dtype=target.dtype, device=rig.device.device)
            for target in targets
        ]

        def submit(turn: int) -> None:
            near, far = chosen[turn % len(chosen)]
            common = {"src_indices": near, "dst_indices": far, "page_size": rig.geometry.page_tokens}
            if len(sources) > 1:
                self._kernels.transfer_hicache_all_layer_staged_lf_pf(
                    k_ptr_src=sources[0],
                    v_ptr_src=sources[1],
                    staging_k=staging[0],
                    staging_v=staging[1],
                    dst_k=targets[0],
                    dst_v=targets[1],
                    **common,
                )
            else:
                self._kernels.transfer_hicache_all_layer_mla_staged_lf_pf(
                    ptr_src=sources[0], staging=staging[0], dst=targets[0], **common
                )

        return submit

    @staticmethod
    def _staged(rig: Rig, case: TransferCase) -> bool:
        return rig.host.layout is Layout.PAGE_FIRST and case.direction.moves == ("backup",)


def _row_nbytes(rig: Rig) -> int:
    return rig.geometry.row_nbytes(rig.geometry.components[0])


def _rows(parts: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return the components of one layer as `[tokens, elements]`."""
    return [part.flatten(1) for part in ((parts,) if isinstance(parts, torch.Tensor) else parts)]


def _host_rows(rig: Rig) -> list[list[torch.Tensor]]:
    """Return, by layer, the components of the host pool as `[tokens, elements]`, strided in `page_first`."""
    axes = rig.host.layout.host_axes
    wholes = [
        rig.host.component_tensor(component.name).permute([axes.index(axis) for axis in "lpthd"])
        for component in rig.geometry.components
    ]
    return [
        [whole[layer].flatten(2).flatten(0, 1) for whole in wholes]
        for layer in range(rig.geometry.num_layers)
    ]


def _pointers(rows: list[list[torch.Tensor]], rig: Rig) -> list[torch.Tensor]:
    """Return, by component, a table of the layers' addresses on the device."""
    return [
        torch.tensor([part.data_ptr() for part in parts], dtype=torch.uint64, device=rig.device.device)
        for parts in zip(*rows, strict=True)
    ]


def _tokens(rig: Rig, pages: torch.Tensor) -> torch.Tensor:
    tokens = pages[:, None] * rig.geometry.page_tokens + torch.arange(rig.geometry.page_tokens)
    return tokens.flatten().to(rig.device.device)
