"""What one page of KV holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from .dtypes import DType
from .errors import InvalidArgumentError


class PoolKind(StrEnum):
    """The kinds of pool that the path table tells apart."""

    MHA = "mha"
    MLA = "mla"
    INDEXER = "indexer"


@dataclass(frozen=True, slots=True)
class Component:
    """One tensor of a layer: K, V, the MLA latent, or the packed indexer block.

    Attributes
    ----------
    name : str
        `k`, `v`, `latent` or `index`.
    heads : int
        Heads a row holds (1 where there is no head axis).
    width : int
        Elements a head holds.
    """

    name: str
    heads: int
    width: int


def positive(name: str, value: object) -> int:
    """Return `value` as an int above zero, or say which argument is wrong."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidArgumentError(f"{name} must be a whole number above 0, got {value!r}.")
    number = int(value.__index__())
    if number <= 0:
        raise InvalidArgumentError(f"{name} must be above 0, got {number}.")
    return number


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape and dtype of one page of KV, without any order of axes (see `Layout`).

    Build it with `mha`, `mla` or `indexer`.

    Attributes
    ----------
    kind : PoolKind
    num_layers : int
    components : tuple[Component, ...]
        Tensors a layer has, in stored order (K before V).
    dtype : DType
        Logical dtype of every component.
    page_tokens : int
        Tokens a page.
    rows : int
        Rows a page has in each layer and component: `page_tokens`, or 1 where a page is one opaque block
        (the packed indexer, whose keys and scales are not interleaved by token).
    """

    kind: PoolKind
    num_layers: int
    components: tuple[Component, ...]
    dtype: DType
    page_tokens: int
    rows: int

    @classmethod
    def mha(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: object,
        page_tokens: int,
    ) -> Self:
        """Multi-head or grouped-query attention: K `[heads, head_dim]`, V `[heads, v_head_dim]` a token."""
        heads = positive("num_kv_heads", num_kv_heads)
        k_width = positive("head_dim", head_dim)
        v_width = k_width if v_head_dim is None else positive("v_head_dim", v_head_dim)
        tokens = positive("page_tokens", page_tokens)
        components = (Component("k", heads, k_width), Component("v", heads, v_width))
        layers = positive("num_layers", num_layers)
        return cls(PoolKind.MHA, layers, components, DType.parse(dtype), tokens, tokens)

    @classmethod
    def mla(cls, *, num_layers: int, latent_dim: int, dtype: object, page_tokens: int) -> Self:
        """Multi-head latent attention: one latent row of `latent_dim` elements a token."""
        tokens = positive("page_tokens", page_tokens)
        components = (Component("latent", 1, positive("latent_dim", latent_dim)),)
        layers = positive("num_layers", num_layers)
        return cls(PoolKind.MLA, layers, components, DType.parse(dtype), tokens, tokens)

    @classmethod
    def indexer(cls, *, num_layers: int, bytes_per_token: int, page_tokens: int) -> Self:
        """Packed DSA index keys and scales: one opaque block of `page_tokens * bytes_per_token` a layer."""
        tokens = positive("page_tokens", page_tokens)
        block = tokens * positive("bytes_per_token", bytes_per_token)
        layers = positive("num_layers", num_layers)
        return cls(PoolKind.INDEXER, layers, (Component("index", 1, block),), DType.UINT8, tokens, 1)

    def row_nbytes(self, component: Component) -> int:
        """Bytes of one row (one token; one page for the indexer) of one layer."""
        return component.heads * component.width * self.dtype.itemsize

    def component_nbytes(self, component: Component) -> int:
        """Bytes one page holds of `component` over all layers."""
        return self.num_layers * self.rows * self.row_nbytes(component)

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page: the sum over components, layers and rows."""
        return sum(self.component_nbytes(component) for component in self.components)

    @property
    def uniform(self) -> bool:
        """Whether all components have one shape."""
        return len({(c.heads, c.width) for c in self.components}) == 1

    def with_layers(self, num_layers: int) -> KVGeometry:
        """Return the same geometry over another number of layers (what a layer-sharded rank holds)."""
        layers = positive("num_layers", num_layers)
        return KVGeometry(self.kind, layers, self.components, self.dtype, self.page_tokens, self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data that `from_dict` takes back; part of a store's readable identity."""
        return {
            "kind": self.kind.value,
            "num_layers": self.num_layers,
            "components": [{"name": c.name, "heads": c.heads, "width": c.width} for c in self.components],
            "dtype": self.dtype.label,
            "page_tokens": self.page_tokens,
            "rows": self.rows,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Read what `as_dict` wrote.

        Raises
        ------
        InvalidArgumentError
            Where a field is missing or of the wrong type.
        """
        try:
            components = tuple(
                Component(str(c["name"]), positive("heads", c["heads"]), positive("width", c["width"]))
                for c in data["components"]
            )
            return cls(
                PoolKind(data["kind"]),
                positive("num_layers", data["num_layers"]),
                components,
                DType.parse(data["dtype"]),
                positive("page_tokens", data["page_tokens"]),
                positive("rows", data["rows"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"not a KV geometry: {error!r} in {data!r}") from error
