"""The engine's own KV tensors, as pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import torch

from hicache_tier_kernels import RowMap, byte_plane

from .errors import InvalidArgumentError
from .geometry import Component, KVGeometry, PoolKind, positive
from .sharding import layer_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    LayerTensors = torch.Tensor | tuple[torch.Tensor, ...]


class DevicePool:
    """Per-layer tensors that an engine already has, wrapped without a copy.

    Page `p` covers tokens `p * page_tokens .. (p + 1) * page_tokens - 1` of every tensor.

    Parameters
    ----------
    geometry : KVGeometry
        Of the whole model.
    layers : sequence
        One entry for each owned layer: `(k, v)` for MHA, the one tensor for MLA and indexer. Shapes:

        - K, V: `[tokens, heads, dim]`;
        - latent: `[tokens, dim]` or `[tokens, 1, dim]`;
        - index: `[pages, page_tokens * bytes_per_token]`, or `[tokens, bytes_per_token]` without gaps.

        Rows may be further apart than their width; within a row elements must be contiguous. Tokens beyond
        the last whole page are left alone. The dtype is the geometry's, or the one that its bytes are
        stored as (uint8 for fp8).
    owned_layers : sequence of int, optional
        Global numbers of the layers given, ascending; all layers where left out.

    Attributes
    ----------
    geometry : KVGeometry
        Of the whole model.
    local_geometry : KVGeometry
        Of the owned layers.
    layers : list
        As given.
    owned_layers : tuple[int, ...]
    sharded : bool
        Whether some layers are not owned.
    num_pages : int
    device : torch.device

    Raises
    ------
    InvalidArgumentError
        For any wrong tensor; names layer, component, what was seen and what is expected.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        layers: Sequence[LayerTensors],
        owned_layers: Sequence[int] | None = None,
    ) -> None:
        if not isinstance(geometry, KVGeometry):
            raise InvalidArgumentError(f"geometry must be a KVGeometry, got {type(geometry).__name__}.")
        owned = range(geometry.num_layers) if owned_layers is None else owned_layers
        self.geometry = geometry
        self.owned_layers = layer_numbers(owned, geometry.num_layers)
        self.sharded = len(self.owned_layers) < geometry.num_layers
        self.local_geometry = geometry.with_layers(len(self.owned_layers))
        if not isinstance(layers, list | tuple) or len(layers) != len(self.owned_layers):
            seen = f"{len(layers)} entries" if isinstance(layers, list | tuple) else type(layers).__name__
            raise InvalidArgumentError(
                f"layers must be a list with one entry for each of the {len(self.owned_layers)} owned "
                f"layers, got {seen}."
            )
        self.layers = list(layers)
        self._row_map = _build_row_map(geometry, self.owned_layers, self.layers)
        self.num_pages = self._row_map.num_pages
        self.device = self._row_map.device

    @classmethod
    def empty(
        cls,
        geometry: KVGeometry,
        num_pages: int,
        device: torch.device | str = "cpu",
        owned_layers: Sequence[int] | None = None,
    ) -> Self:
        """Allocate tensors of the shapes described above, without gaps and without initialising them."""
        pages = positive("num_pages", num_pages)
        owned = range(geometry.num_layers) if owned_layers is None else owned_layers
        shapes = [next(iter(_row_shapes(geometry, part).items())) for part in geometry.components]
        layers: list[LayerTensors] = []
        for _ in layer_numbers(owned, geometry.num_layers):
            tensors = tuple(
                torch.empty((pages * rows, *shape), dtype=geometry.dtype.torch, device=device)
                for shape, rows in shapes
            )
            layers.append(tensors if len(tensors) > 1 else tensors[0])
        return cls(geometry, layers, owned_layers)

    def row_map(self) -> RowMap:
        """Return where rows lie: planes by component, then by owned layer."""
        return self._row_map

    def __repr__(self) -> str:
        layers = f"{len(self.owned_layers)} of {self.geometry.num_layers} layers"
        return f"DevicePool({self.geometry.kind.value}, {layers}, {self.num_pages} pages, {self.device})"


def _build_row_map(geometry: KVGeometry, owned: tuple[int, ...], layers: Sequence[LayerTensors]) -> RowMap:
    by_layer = [_layer_planes(geometry, layer, tensors) for layer, tensors in zip(owned, layers, strict=True)]
    first = by_layer[0][0]
    seen: dict[int, str] = {}
    for layer, planes in zip(owned, by_layer, strict=True):
        for component, plane in zip(geometry.components, planes, strict=True):
            name = f"layer {layer} {component.name}"
            if plane.device != first.device:
                raise InvalidArgumentError(
                    f"{name} is on {plane.device}; expected {first.device}, as layer {owned[0]}."
                )
            if plane.shape[0] != first.shape[0]:
                raise InvalidArgumentError(
                    f"{name} holds {plane.shape[0]} pages; expected {first.shape[0]}, as layer {owned[0]}."
                )
            if plane.data_ptr() in seen:
                raise InvalidArgumentError(
                    f"{name} is the same memory as {seen[plane.data_ptr()]}; expected its own."
                )
            seen[plane.data_ptr()] = name
    return RowMap(tuple(plane for planes in zip(*by_layer, strict=True) for plane in planes))


def _layer_planes(geometry: KVGeometry, layer: int, tensors: object) -> tuple[torch.Tensor, ...]:
    given = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
    names = ", ".join(component.name for component in geometry.components)
    if not isinstance(given, tuple | list) or len(given) != len(geometry.components):
        seen = f"{len(given)} tensors" if isinstance(given, tuple | list) else type(given).__name__
        raise InvalidArgumentError(f"layer {layer} is {seen}; expected the tensors {names}.")
    pairs = zip(geometry.components, given, strict=True)
    return tuple(_plane(geometry, component, tensor, layer) for component, tensor in pairs)


def _plane(geometry: KVGeometry, component: Component, tensor: object, layer: int) -> torch.Tensor:
    """Check one tensor and return its byte view `[pages, rows, 1, row_nbytes]`."""
    name = f"layer {layer} {component.name}"
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        seen = str(tensor.layout) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InvalidArgumentError(f"{name} is {seen}; expected a dense torch.Tensor.")
    allowed = dict.fromkeys((geometry.dtype.torch, getattr(torch, geometry.dtype.storage)))
    if tensor.dtype not in allowed:
        expected = " or ".join(map(str, allowed))
        raise InvalidArgumentError(f"{name} is {tensor.dtype}; expected {expected}.")
    shapes = _row_shapes(geometry, component)
    rows = shapes.get(tuple(tensor.shape[1:]))
    if tensor.dim() < 2 or rows is None:
        expected = " or ".join(f"[n, {', '.join(map(str, shape))}]" for shape in shapes)
        raise InvalidArgumentError(
            f"{name} has shape {tuple(tensor.shape)}; expected {expected}, rows of "
            f"{component.heads} x {component.width} {geometry.dtype.label}."
        )
    num_pages = tensor.shape[0] // rows
    if not num_pages:
        raise InvalidArgumentError(
            f"{name} has {tensor.shape[0]} rows; expected at least the {rows} of one page."
        )
    itemsize = geometry.dtype.itemsize
    row_nbytes = geometry.row_nbytes(component)
    step = tensor.stride(0) * itemsize
    if not tensor[0].is_contiguous():
        raise InvalidArgumentError(
            f"{name} has strides {tensor.stride()}; expected contiguous elements within a row."
        )
    packed = rows != geometry.rows  # one opaque block a page, given as its tokens
    width = row_nbytes // rows if packed else row_nbytes
    if (packed and step != width) or (step < width and tensor.shape[0] > 1):
        wanted = "exactly" if packed else "at least"
        raise InvalidArgumentError(
            f"{name} has rows {step} bytes apart; expected {wanted} {width}, the bytes of one row."
        )
    shape = (num_pages, geometry.rows, 1, row_nbytes)
    strides = (rows * step, row_nbytes if packed else step, row_nbytes)
    return byte_plane(tensor, 0, shape, strides)


def _row_shapes(geometry: KVGeometry, component: Component) -> dict[tuple[int, ...], int]:
    """Return what one entry along axis 0 may look like, the usual first, and how many make a page."""
    heads, width, tokens = component.heads, component.width, geometry.page_tokens
    by_kind: dict[PoolKind, dict[tuple[int, ...], int]] = {
        PoolKind.MHA: {(heads, width): tokens},
        PoolKind.MLA: {(width,): tokens, (heads, width): tokens},
        PoolKind.INDEXER: {(width,): 1} if tokens == 1 else {(width,): 1, (width // tokens,): tokens},
    }
    return by_kind[geometry.kind]
