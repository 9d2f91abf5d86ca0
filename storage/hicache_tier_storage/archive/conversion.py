"""What pages may be converted to, and what that makes of a pool's geometry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hicache_tier.dtypes import DType
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import PoolKind, positive
from hicache_tier.layout import Layout

from .convert import FLOATS
from .manifest import MAX_PAGE_NBYTES

if TYPE_CHECKING:
    from hicache_tier.geometry import KVGeometry
    from hicache_tier_storage.identity import Identity


_MOST_RANKS = 4096


class CannotConvertError(Exception):
    """Why pages cannot become what was asked for."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What pages are to become; None leaves as it is.

    Attributes
    ----------
    layout : Layout, optional
    page_tokens : int, optional
        Tokens a page. Keys are computed anew, from token ids that are in the archive.
    tp : int, optional
        Ranks that share the heads.
    kv_heads : int, optional
        KV heads of the model, where ranks hold copies of a head: by default `heads of a rank * ranks`.
    dtype : DType, optional
        float32, float16 or bfloat16.
    allow_lossy : bool
        Let values be rounded.
    """

    layout: Layout | None = None
    page_tokens: int | None = None
    tp: int | None = None
    kv_heads: int | None = None
    dtype: DType | None = None
    allow_lossy: bool = False

    @classmethod
    def parse(
        cls,
        *,
        layout: Layout | str | None = None,
        page_tokens: int | None = None,
        tp: int | None = None,
        kv_heads: int | None = None,
        dtype: object = None,
        allow_lossy: bool = False,
    ) -> Conversion:
        """Check what a user asked for."""
        numbers = {"page_tokens": page_tokens, "tp": tp, "kv_heads": kv_heads}
        checked = {name: None if value is None else positive(name, value) for name, value in numbers.items()}
        if checked["tp"] is not None and checked["tp"] > _MOST_RANKS:
            raise InvalidArgumentError(f"tp must be at most {_MOST_RANKS}, got {tp}.")
        wanted = None if dtype is None else DType.parse(dtype)
        if wanted not in {None, *FLOATS}:
            names = ", ".join(one.label for one in FLOATS)
            raise InvalidArgumentError(f"dtype must be one of {names}, got {dtype!r}: others need scales.")
        return cls(
            None if layout is None else Layout.parse(layout), dtype=wanted, allow_lossy=allow_lossy, **checked
        )


def total_heads(identity: Identity, conversion: Conversion) -> int:
    """KV heads of the model that the pool of an MHA identity is part of."""
    held = identity.geometry.components[0].heads
    return conversion.kv_heads or held * identity.tp.size


def heads_of(rank: int, size: int, total: int) -> range:
    """Heads that one of `size` ranks holds: an equal share, or a copy of one where there are fewer."""
    if size <= total:
        return range(rank * total // size, (rank + 1) * total // size)
    first = rank // (size // total)
    return range(first, first + 1)


def holders_of(head: int, size: int, total: int) -> range:
    """Ranks that hold a head; they hold the same heads."""
    if size <= total:
        return range(head * size // total, head * size // total + 1)
    each = size // total
    return range(head * each, (head + 1) * each)


def converted_geometry(
    geometry: KVGeometry, identity: Identity, conversion: Conversion, tp: int
) -> KVGeometry:
    """Return what a pool of the namespace holds after the conversion."""
    new = geometry
    if geometry.kind is PoolKind.MHA and (conversion.tp or conversion.kv_heads):
        total = total_heads(replace(identity, geometry=geometry), conversion)
        for size in (identity.tp.size, tp):
            if total % size and size % total:
                raise CannotConvertError(f"heads: {total} KV heads cannot be shared by {size} ranks")
        held = len(heads_of(0, identity.tp.size, total))
        if held != geometry.components[0].heads:
            raise CannotConvertError(
                f"heads: of {total} KV heads each of {identity.tp.size} ranks would hold {held}, "
                f"and holds {geometry.components[0].heads}; see --kv-heads"
            )
        heads = len(heads_of(0, tp, total))
        new = replace(new, components=tuple(replace(c, heads=heads) for c in new.components))
    if conversion.dtype is not None and geometry.dtype in FLOATS:
        new = replace(new, dtype=conversion.dtype)
    if conversion.page_tokens is not None and conversion.page_tokens != geometry.page_tokens:
        new = _with_tokens(new, conversion.page_tokens)
    return new


def _with_tokens(geometry: KVGeometry, tokens: int) -> KVGeometry:
    if geometry.rows == geometry.page_tokens:
        return replace(geometry, page_tokens=tokens, rows=tokens)
    (block,) = geometry.components
    width = block.width // geometry.page_tokens * tokens
    return replace(geometry, page_tokens=tokens, components=(replace(block, width=width),))


def why_not_converted(old: KVGeometry, new: KVGeometry, conversion: Conversion) -> str:
    """Say why pages of a pool cannot be converted, or nothing."""
    few, many = sorted((old.page_tokens, new.page_tokens))
    if few != many and old.kind is PoolKind.INDEXER:
        return "page_tokens: a page of the indexer is one opaque block"
    if many % few:
        return f"page_tokens: {old.page_tokens} and {new.page_tokens} are no multiples of each other"
    if new.page_nbytes > MAX_PAGE_NBYTES:
        return f"size: a page would have {new.page_nbytes} bytes, and has at most {MAX_PAGE_NBYTES}"
    if conversion.dtype is not None and old.kind is not PoolKind.INDEXER and old.dtype not in FLOATS:
        return f"dtype: {old.dtype.label} is not converted"
    exact = old.dtype is new.dtype or new.dtype is DType.FLOAT32
    if not exact and not conversion.allow_lossy:
        return f"dtype: {old.dtype.label} to {new.dtype.label} rounds; see --allow-lossy"
    return ""
