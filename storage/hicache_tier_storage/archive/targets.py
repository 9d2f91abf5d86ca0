"""Where the pages of an archive go: for each rank and pool that comes of it, which parts make its pages."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hicache_tier.dtypes import DType
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import KVGeometry, PoolKind, positive
from hicache_tier.layout import Layout
from hicache_tier_storage.identity import Identity

from .convert import FLOATS, HeadRange, Shape
from .errors import ArchiveError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .reader import Archive, ArchivePart

_COORDINATE = re.compile(r"([a-z]{2})(\d+)of(\d+)")
_TEXTS = ("model", "revision", "adapter", "scales", "rope", "key_algorithm")


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
        wanted = None if dtype is None else DType.parse(dtype)
        if wanted not in {None, *FLOATS}:
            names = ", ".join(one.label for one in FLOATS)
            raise InvalidArgumentError(f"dtype must be one of {names}, got {dtype!r}: others need scales.")
        return cls(
            None if layout is None else Layout.parse(layout), dtype=wanted, allow_lossy=allow_lossy, **checked
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Pages of one part of the archive as they make pages of a target: which heads, and where they go."""

    part: ArchivePart
    heads: HeadRange


@dataclass(slots=True)
class Target:
    """One rank and pool to be imported.

    Attributes
    ----------
    identity : Identity
        What its store is opened as.
    shape : Shape
    pieces : list of Piece
        All of them are needed for each page.
    """

    identity: Identity
    shape: Shape
    pieces: list[Piece] = field(default_factory=list)

    @property
    def unchanged(self) -> bool:
        """Whether pages are taken as they are."""
        facts = self.pieces[0].part.facts
        return len(self.pieces) == 1 and self.shape.same_bytes(Shape(facts.geometry, facts.layout))

    @property
    def rekeyed(self) -> bool:
        """Whether pages have other keys: their number of tokens changes."""
        return self.pieces[0].part.facts.geometry.page_tokens != self.shape.geometry.page_tokens

    def __str__(self) -> str:
        return f"{self.identity.namespace}/{self.identity.rank}/{self.identity.pool}"


@dataclass(slots=True)
class Plan:
    """Targets of an archive, and why parts of it have none."""

    targets: list[Target] = field(default_factory=list)
    refused: list[tuple[ArchivePart, str]] = field(default_factory=list)


def plan_targets(
    archive: Archive, conversion: Conversion, tenants: Sequence[str] = (), namespaces: Sequence[str] = ()
) -> Plan:
    """Find a target for every part of an archive.

    Parameters
    ----------
    archive : Archive
    conversion : Conversion
    tenants : sequence of str
        Salts of tenants; archives hold their digests only.
    namespaces : sequence of str
        First digits of those wanted; all where there are none.

    Raises
    ------
    ArchiveError
        Where an identity does not hash to its namespace: the manifest lies.
    """
    plan = Plan()
    spaces: dict[str, list[ArchivePart]] = {}
    for part in archive.parts:
        space = part.facts.name.namespace
        if not namespaces or any(space.startswith(start) for start in namespaces):
            spaces.setdefault(space, []).append(part)
    for space, parts in spaces.items():
        told = archive.manifest.identities[space]
        try:
            sources = [(part, identity_of(told, part, tenants)) for part in parts]
            _add_targets(plan, sources, conversion)
        except CannotConvertError as reason:
            plan.refused += [(part, str(reason)) for part in parts]
    return plan


def identity_of(told: dict[str, Any], part: ArchivePart, tenants: Sequence[str]) -> Identity:
    """Return the identity that a part was stored under, checked against the name of its namespace."""
    facts = part.facts
    digest, tenant = told.get("tenant_sha256"), None
    if digest is not None:
        known = {hashlib.sha256(salt.encode()).hexdigest()[:16]: salt for salt in tenants}
        tenant = known.get(digest)
        if tenant is None:
            raise CannotConvertError(f"tenant: its salt is needed (digest {str(digest)[:16]})")
    sizes = told.get("parallel")
    ranks = {axis: (int(rank), int(size)) for axis, rank, size in _COORDINATE.findall(facts.name.rank)}
    try:
        pools = {name: KVGeometry.from_dict(geometry) for name, geometry in told["pools"].items()}
        given = {axis: (0, size) for axis, size in (sizes or {}).items() if axis in {"tp", "pp", "cp"}}
        identity = Identity.build(
            facts.geometry,
            facts.layout,
            pool=facts.name.pool,
            beside=tuple(sorted((n, g) for n, g in pools.items() if n != facts.name.pool)),
            tenant=tenant,
            **{name: told.get(name) for name in _TEXTS},
            **({"tp": (0, 1), "pp": (0, 1), "cp": (0, 1)} | given | ranks),
        )
    except (InvalidArgumentError, AttributeError) as error:
        raise ArchiveError(f"{facts.name}: the manifest's identity is damaged: {error}") from error
    if identity.as_attributes()["parallel"] != sizes:
        raise ArchiveError(f"{facts.name}: the manifest's identity is damaged: parallel is {sizes!r}.")
    if (identity.namespace, identity.rank) != (facts.name.namespace, facts.name.rank):
        raise ArchiveError(
            f"{facts.name}: the identity that the manifest tells is that of "
            f"{identity.namespace}/{identity.rank}; nothing is imported under a name that it is not."
        )
    return identity


def _add_targets(plan: Plan, sources: list[tuple[ArchivePart, Identity]], conversion: Conversion) -> None:
    """Add the targets of one namespace."""
    identity = sources[0][1]
    layout = conversion.layout or sources[0][0].facts.layout
    tp = conversion.tp or identity.tp.size
    pools = {
        name: _converted(geometry, identity, conversion, tp) for name, geometry in identity.pools.items()
    }
    found: dict[tuple[str, str], Target] = {}
    for part, own in sources:
        why = layout.why_not(own.geometry.kind) or _why_not(own.geometry, pools[own.pool], conversion)
        if why:
            plan.refused.append((part, why))
            continue
        for rank in _ranks_after(own, tp, conversion):
            new = replace(
                own,
                geometry=pools[own.pool],
                axis_order=layout.page_axes,
                beside=tuple(sorted((n, g) for n, g in pools.items() if n != own.pool)),
                tp=replace(own.tp, rank=rank, size=tp),
            )
            found.setdefault((new.rank, new.pool), Target(new, Shape(new.geometry, layout)))
    for target in found.values():
        missing = _find_pieces(target, sources, conversion)
        if missing:
            plan.refused += [(piece.part, missing) for piece in target.pieces]
        else:
            plan.targets.append(target)


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


def _converted(geometry: KVGeometry, identity: Identity, conversion: Conversion, tp: int) -> KVGeometry:
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


def _why_not(old: KVGeometry, new: KVGeometry, conversion: Conversion) -> str:
    """Say why pages of a pool cannot be converted, or nothing."""
    few, many = sorted((old.page_tokens, new.page_tokens))
    if few != many and old.kind is PoolKind.INDEXER:
        return "page_tokens: a page of the indexer is one opaque block"
    if many % few:
        return f"page_tokens: {old.page_tokens} and {new.page_tokens} are no multiples of each other"
    if conversion.dtype is not None and old.kind is not PoolKind.INDEXER and old.dtype not in FLOATS:
        return f"dtype: {old.dtype.label} is not converted"
    exact = old.dtype is new.dtype or new.dtype is DType.FLOAT32
    if not exact and not conversion.allow_lossy:
        return f"dtype: {old.dtype.label} to {new.dtype.label} rounds; see --allow-lossy"
    return ""


def _ranks_after(identity: Identity, tp: int, conversion: Conversion) -> list[int]:
    """Ranks whose pages this part may be needed for."""
    if "tp" in identity.replicated:
        return [0]
    if tp == identity.tp.size:
        return [identity.tp.rank]
    total = total_heads(identity, conversion)
    held = {*heads_of(identity.tp.rank, identity.tp.size, total)}
    return [rank for rank in range(tp) if held.intersection(heads_of(rank, tp, total))]


def _find_pieces(target: Target, sources: list[tuple[ArchivePart, Identity]], conversion: Conversion) -> str:
    """Fill in the parts that make the target's pages; return what is missing of them."""
    new = target.identity
    beside = [
        (part, own) for part, own in sources if own.pool == new.pool and (own.pp, own.cp) == (new.pp, new.cp)
    ]
    if "tp" in new.replicated:
        part, own = beside[0]
        target.pieces = [Piece(part, HeadRange(0, 0, own.geometry.components[0].heads))]
        return ""
    total = total_heads(beside[0][1], conversion)
    old_size = beside[0][1].tp.size
    by_rank = {own.tp.rank: part for part, own in beside}
    if old_size == new.tp.size:
        by_rank = {rank: part for rank, part in by_rank.items() if rank == new.tp.rank}
    missing: list[int] = []
    for at, head in enumerate(heads_of(new.tp.rank, new.tp.size, total)):
        holders = [rank for rank in range(old_size) if head in heads_of(rank, old_size, total)]
        rank = next((rank for rank in holders if rank in by_rank), None)
        if rank is None:
            missing.append(holders[0])
            continue
        first = head - heads_of(rank, old_size, total).start
        last = target.pieces[-1] if target.pieces else None
        if last and last.part is by_rank[rank] and last.heads.source + last.heads.count == first:
            target.pieces[-1] = replace(last, heads=replace(last.heads, count=last.heads.count + 1))
        else:
            target.pieces.append(Piece(by_rank[rank], HeadRange(first, at, 1)))
    names = ", ".join(f"tp{rank}of{old_size}" for rank in dict.fromkeys(missing))
    return (
        f"rank: {names} is not in the archive, and holds heads of tp{new.tp.rank}of{new.tp.size}"
        if names
        else ""
    )
