"""What `bench transfer` measures: models' geometries by name, and the cases of a selection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING

from hicache_tier.errors import InvalidArgumentError, not_known
from hicache_tier.geometry import KVGeometry, positive
from hicache_tier.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

GEOMETRIES: dict[str, Callable[[int], KVGeometry]] = {
    "llama-3.1-8b": lambda page: _mha(32, 8, page),
    "llama-70b-tp8": lambda page: _mha(80, 1, page),
    "qwen3-30b": lambda page: _mha(48, 4, page),
    "qwen3-30b-tp4": lambda page: _mha(48, 1, page),
    "mla-bf16": lambda page: _mla(576, "bfloat16", page),
    "mla-fp8": lambda page: _mla(576, "float8_e4m3fn", page),
    "dsa-fp8": lambda page: _mla(656, "uint8", page),
    "indexer": lambda page: KVGeometry.indexer(num_layers=61, bytes_per_token=132, page_tokens=page),
}
"""Geometry of one rank by model, given tokens a page; heads hold 128 bf16 elements, MLA has 61 layers."""

PAGES = (1, 16, 64, 128)
TOKENS = (256, 8192, 32768)
ORDERS = ("random", "runs")
LAYOUTS = tuple(layout.value for layout in Layout)
IO_BACKENDS = ("auto", "kernel", "direct")
PEERS = ("sglang", "memcpy-loop")


class Direction(StrEnum):
    """What moves, in which calls.

    `load` is one call, whose layers arrive one after another where the path allows it; `load_layer` is one
    call a layer; `both` is a backup and a load of other pages at once.
    """

    BACKUP = "backup"
    LOAD_LAYER = "load_layer"
    LOAD = "load"
    BOTH = "both"

    @property
    def moves(self) -> tuple[str, ...]:
        """`backup`, `load`, or both of them at once."""
        if self is Direction.BOTH:
            return ("backup", "load")
        return ("backup",) if self is Direction.BACKUP else ("load",)

    @property
    def links(self) -> tuple[str, ...]:
        """Directions of the link, as keys of C."""
        return tuple("d2h" if move == "backup" else "h2d" for move in self.moves)


@dataclass(frozen=True, slots=True)
class TransferCase:
    """One cell of the matrix.

    Attributes
    ----------
    geometry : str
        A name in `GEOMETRIES`.
    page_tokens : int
    layout : str
    io_backend : str
        `auto`, `kernel` or `direct`.
    direction : Direction
    tokens : int
        Tokens that move in each direction.
    order : str
        `random` pages, or `runs` of eight consecutive ones in random order.
    """

    geometry: str
    page_tokens: int
    layout: str
    io_backend: str
    direction: Direction
    tokens: int
    order: str = "random"

    def __post_init__(self) -> None:
        if self.geometry not in GEOMETRIES:
            raise not_known("geometry", self.geometry, list(GEOMETRIES))
        if self.order not in ORDERS:
            raise not_known("order", self.order, ORDERS)
        Layout.parse(self.layout)
        positive("page_tokens", self.page_tokens)
        if positive("tokens", self.tokens) % self.page_tokens:
            raise InvalidArgumentError(
                f"tokens must be a multiple of page_tokens, got {self.tokens} and {self.page_tokens}."
            )

    @property
    def pages(self) -> int:
        """Pages that move in each direction."""
        return self.tokens // self.page_tokens

    @property
    def pools(self) -> tuple[str, int, str]:
        """What cases must have in common to be measured in the same pools."""
        return self.geometry, self.page_tokens, self.layout

    @property
    def kv_geometry(self) -> KVGeometry:
        """The geometry that is meant."""
        return GEOMETRIES[self.geometry](self.page_tokens)

    @property
    def name(self) -> str:
        """The case in one line."""
        return (
            f"{self.geometry}, page {self.page_tokens}, {self.layout}, {self.io_backend}, "
            f"{self.direction.value}, {self.tokens} tokens, {self.order}"
        )


@dataclass(frozen=True, slots=True)
class Selection:
    """Axes of the matrix whose product is measured; layouts that a geometry cannot have are left out."""

    geometries: Sequence[str]
    pages: Sequence[int]
    layouts: Sequence[str]
    io_backends: Sequence[str]
    directions: Sequence[Direction]
    tokens: Sequence[int]
    orders: Sequence[str]

    @classmethod
    def full(cls) -> Selection:
        """Return the whole matrix."""
        return cls(
            tuple(GEOMETRIES),
            PAGES,
            LAYOUTS,
            IO_BACKENDS,
            tuple(Direction),
            TOKENS,
            ORDERS,
        )

    @classmethod
    def default(cls, *, cuda: bool) -> Selection:
        """Return what is measured where nothing is chosen: under a minute, on a GPU or without one."""
        directions = (Direction.BACKUP, Direction.LOAD, Direction.LOAD_LAYER)
        layouts = ("layer_first", "page_first", "page_first_direct")
        if not cuda:
            small = ("llama-3.1-8b", "mla-fp8", "indexer")
            return cls(small, (16,), layouts, ("auto",), directions, (256,), ("random",))
        geometries = ("llama-3.1-8b", "qwen3-30b-tp4", "mla-bf16", "dsa-fp8", "indexer")
        return cls(geometries, (64, 1), layouts, ("auto",), directions, (8192,), ("random",))

    def but(self, **chosen: Sequence[object]) -> Selection:
        """Return the selection with those axes replaced that are not empty."""
        return replace(self, **{axis: values for axis, values in chosen.items() if values})  # type: ignore[arg-type]

    def cases(self) -> list[TransferCase]:
        """Return the cases, those of the same pools next to each other."""
        found = []
        for geometry, page, layout in product(self.geometries, self.pages, self.layouts):
            unfit = geometry in GEOMETRIES and Layout.parse(layout).why_not(GEOMETRIES[geometry](page).kind)
            if unfit:
                continue
            found += [
                TransferCase(geometry, page, layout, io_backend, direction, tokens, order)
                for io_backend, tokens, order, direction in product(
                    self.io_backends, self.tokens, self.orders, self.directions
                )
            ]
        return found


def grouped(cases: Iterable[TransferCase]) -> list[list[TransferCase]]:
    """Return the cases by the pools they need, in order of first use."""
    groups: dict[tuple[str, int, str], list[TransferCase]] = {}
    for case in cases:
        groups.setdefault(case.pools, []).append(case)
    return list(groups.values())


def _mha(layers: int, heads: int, page: int) -> KVGeometry:
    return KVGeometry.mha(
        num_layers=layers, num_kv_heads=heads, head_dim=128, dtype="bfloat16", page_tokens=page
    )


def _mla(width: int, dtype: str, page: int) -> KVGeometry:
    return KVGeometry.mla(num_layers=61, latent_dim=width, dtype=dtype, page_tokens=page)
