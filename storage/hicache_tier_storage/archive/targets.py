"""Where the pages of an archive go: for each rank and pool that comes of it, which parts make its pages."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hicache_tier.errors import InvalidArgumentError
from hicache_tier_storage.identity import Identity

from .conversion import (
    CannotConvertError,
    Conversion,
    converted_geometry,
    heads_of,
    holders_of,
    total_heads,
    why_not_converted,
)
from .convert import HeadRange, Shape
from .errors import ArchiveError
from .manifest import geometry_of
from .selection import check_namespaces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .reader import Archive, ArchivePart
    from .units import Units

_COORDINATE = re.compile(r"([a-z]{2})(\d+)of(\d+)")
_MOST_NAMED = 8
_TEXTS = ("model", "revision", "adapter", "scales", "rope", "key_algorithm")


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
    units : Units, optional
        What is imported, where keys change: computed once.
    """

    identity: Identity
    shape: Shape
    pieces: list[Piece] = field(default_factory=list)
    units: Units | None = None

    @property
    def unchanged(self) -> bool:
        """Whether pages are taken as they are."""
        facts = self.pieces[0].part.facts
        return len(self.pieces) == 1 and self.shape.same_bytes(Shape(facts.geometry, facts.layout))

    @property
    def nbytes(self) -> int:
        """Payload that the target has where every page can be had."""
        facts, geometry = self.pieces[0].part.facts, self.shape.geometry
        tokens = facts.pages * facts.geometry.page_tokens
        return tokens * geometry.page_nbytes // geometry.page_tokens

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
    InvalidArgumentError
        Where no namespace begins with some of those digits.
    ArchiveError
        Where an identity does not hash to its namespace: the manifest lies.
    """
    plan = Plan()
    check_namespaces(namespaces, (part.facts.name.namespace for part in archive.parts))
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
        tenant = known.get(str(digest))
        if tenant is None:
            raise CannotConvertError(f"tenant: its salt is needed (digest {str(digest)[:16]})")
    sizes = told.get("parallel")
    ranks = {axis: (int(rank), int(size)) for axis, rank, size in _COORDINATE.findall(facts.name.rank)}
    try:
        pools = {name: geometry_of(geometry) for name, geometry in told["pools"].items()}
        given = {axis: (0, size) for axis, size in (sizes or {}).items() if axis in {"tp", "pp", "cp"}}
        identity = Identity.build(
            facts.geometry,
            facts.layout,
            pool=facts.name.pool,
            beside=tuple(sorted((n, g) for n, g in pools.items() if n != facts.name.pool)),
            tenant=tenant,
            **{name: told.get(name) for name in _TEXTS},
            **({"tp": (0, 1), "pp": (0, 1), "cp": (0, 1)} | given | ranks),
            encrypted="encryption" in told,
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
        name: converted_geometry(geometry, identity, conversion, tp)
        for name, geometry in identity.pools.items()
    }
    found: dict[tuple[str, str], Target] = {}
    for part, own in sources:
        why = layout.why_not(own.geometry.kind) or why_not_converted(
            own.geometry, pools[own.pool], conversion
        )
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


def _ranks_after(identity: Identity, tp: int, conversion: Conversion) -> list[int]:
    """Ranks whose pages this part may be needed for."""
    if "tp" in identity.replicated:
        return [0]
    if tp == identity.tp.size:
        return [identity.tp.rank]
    total = total_heads(identity, conversion)
    held = heads_of(identity.tp.rank, identity.tp.size, total)
    return [*range(holders_of(held[0], tp, total).start, holders_of(held[-1], tp, total).stop)]


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
    wanted = heads_of(new.tp.rank, new.tp.size, total)
    missing: list[str] = []
    head = wanted.start
    while head < wanted.stop:
        holders = holders_of(head, old_size, total)
        held = heads_of(holders[0], old_size, total)
        stop = min(held.stop, wanted.stop)
        rank = next((rank for rank in holders if rank in by_rank), None)
        if rank is None:
            missing.append(f"tp{holders[0]}of{old_size}")
        else:
            heads = HeadRange(head - held.start, head - wanted.start, stop - head)
            target.pieces.append(Piece(by_rank[rank], heads))
        head = stop
    if not missing:
        return ""
    names = ", ".join(missing[:_MOST_NAMED]) + (", ..." if len(missing) > _MOST_NAMED else "")
    return f"rank: {names} is not in the archive, and holds heads of tp{new.tp.rank}of{new.tp.size}"
