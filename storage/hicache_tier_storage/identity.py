"""Identity of a namespace: everything that decides what stored bytes mean.

Two identities that differ in any field hash to different namespaces, so a page written under one is a miss
under the other; nothing is ever reinterpreted.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import PoolKind

from .encryption import ALGORITHM, encryption_attribute

if TYPE_CHECKING:
    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout

FORMAT_NAME = "hct"
FORMAT_VERSION = 2
PLAIN_VERSION = 1
"""What is not encrypted is of version 1 to the byte, and says so."""


@dataclass(frozen=True, slots=True)
class Coordinate:
    """One parallel axis: this process's `rank` among `size`."""

    axis: str
    rank: int
    size: int

    @classmethod
    def parse(cls, axis: str, value: object) -> Coordinate:
        """Take `(rank, size)` with `0 <= rank < size`."""
        if isinstance(value, tuple | list) and len(value) == 2:
            rank, size = value
            if type(rank) is int and type(size) is int and 0 <= rank < size:
                return cls(axis, rank, size)
        raise InvalidArgumentError(f"{axis} must be (rank, size) with 0 <= rank < size, got {value!r}.")

    def __str__(self) -> str:
        return f"{self.axis}{self.rank}of{self.size}"


@dataclass(frozen=True, slots=True)
class Identity:
    """What the bytes of a namespace mean.

    Attributes
    ----------
    geometry : KVGeometry
        Of one rank.
    axis_order : str
        Axes of a stored page, outermost first (`Layout.page_axes`); `layer_first` and `page_first_direct`
        store the same bytes and share it.
    pool : str
        Name of the pool (`kv`, `indexer`, ...).
    beside : tuple of (str, KVGeometry)
        Names and geometries of the other pools of the set; each is a partition beside this one.
    model, revision, adapter, rope, scales, key_algorithm : str or None
        Absent (None) differs from empty.
    tenant : str or None
        Tenant salt. Only its digest is ever written.
    tp, pp, cp : Coordinate
        Tensor, pipeline and context parallel coordinates.
    encrypted : bool
        Whether the pages are; the key is no part of the identity, so that a wrong one is told from a miss.
    """

    geometry: KVGeometry
    axis_order: str
    pool: str
    model: str | None
    revision: str | None
    tenant: str | None = field(repr=False)
    adapter: str | None
    tp: Coordinate
    pp: Coordinate
    cp: Coordinate
    beside: tuple[tuple[str, KVGeometry], ...] = ()
    scales: str | None = None
    rope: str | None = None
    key_algorithm: str | None = "sha256-chain"
    encrypted: bool = False

    @classmethod
    def build(cls, geometry: KVGeometry, layout: Layout, **fields: Any) -> Identity:  # noqa: ANN401
        """Check the fields that come from outside and normalise the coordinates."""
        for name in ("model", "revision", "tenant", "adapter", "scales", "rope", "key_algorithm"):
            value = fields.get(name)
            shown = "what was given" if name == "tenant" else repr(value)
            if value is not None and not isinstance(value, str):
                raise InvalidArgumentError(f"{name} must be text or None, got {shown}.")
            if isinstance(value, str):
                try:
                    value.encode()
                except UnicodeEncodeError:
                    raise InvalidArgumentError(f"{name} is not valid Unicode: {shown}.") from None
        for axis in ("tp", "pp", "cp"):
            fields[axis] = Coordinate.parse(axis, fields[axis])
        return cls(geometry=geometry, axis_order=layout.page_axes, **fields)

    @property
    def pools(self) -> dict[str, KVGeometry]:
        """Every pool of the set, by name."""
        return dict(sorted([(self.pool, self.geometry), *self.beside]))

    @property
    def replicated(self) -> tuple[str, ...]:
        """Parallel axes over which every rank holds the same bytes of this pool."""
        return _replicated(self.geometry)

    @property
    def coordinates(self) -> tuple[Coordinate, ...]:
        """Coordinates that change the bytes."""
        return tuple(c for c in (self.tp, self.pp, self.cp) if c.axis not in self.replicated)

    @property
    def rank(self) -> str:
        """Directory name of this rank, without its writer number."""
        return "-".join(str(coordinate) for coordinate in self.coordinates)

    @property
    def namespace(self) -> str:
        """First 32 hex digits of SHA-256 over the tagged, length-prefixed fields."""
        digest = hashlib.sha256(b"hct-namespace-1")
        for tag, value in self._fields():
            raw = b"" if value is None else value.encode()
            digest.update(struct.pack("<I", len(tag)) + tag.encode())
            digest.update(struct.pack("<BQ", value is not None, len(raw)) + raw)
        return digest.hexdigest()[:32]

    def _fields(self) -> list[tuple[str, str | None]]:
        return [
            ("model", self.model),
            ("revision", self.revision),
            ("scales", self.scales),
            *(field for name, geometry in self.pools.items() for field in _pool_fields(name, geometry)),
            ("axis_order", self.axis_order),
            *((f"{axis}_size", str(size)) for axis, size in self._parallel.items()),
            ("rope", self.rope),
            ("key_algorithm", self.key_algorithm),
            ("tenant", self.tenant),
            ("adapter", self.adapter),
            *([("encryption", ALGORITHM)] if self.encrypted else []),
        ]

    @property
    def _parallel(self) -> dict[str, int]:
        """Sizes of the axes that change the bytes of any pool of the set."""
        same = set.intersection(*(set(_replicated(geometry)) for geometry in self.pools.values()))
        return {c.axis: c.size for c in (self.tp, self.pp, self.cp) if c.axis not in same}

    def as_attributes(self, key_check: str = "") -> dict[str, Any]:
        """Readable form, kept in the namespace group's attributes; the tenant's salt as a digest.

        `key_check` is that of the key, where pages are encrypted.
        """
        tenant = None if self.tenant is None else hashlib.sha256(self.tenant.encode()).hexdigest()[:16]
        return {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION if self.encrypted else PLAIN_VERSION,
            "model": self.model,
            "revision": self.revision,
            "pools": {name: geometry.as_dict() for name, geometry in self.pools.items()},
            "axis_order": self.axis_order,
            "scales": self.scales,
            "rope": self.rope,
            "key_algorithm": self.key_algorithm,
            "tenant_sha256": tenant,
            "adapter": self.adapter,
            "parallel": self._parallel,
            **encryption_attribute(key_check),
        }


def _replicated(geometry: KVGeometry) -> tuple[str, ...]:
    """Parallel axes over which every rank holds the same bytes: MLA and indexer rows are not cut by heads."""
    return () if geometry.kind is PoolKind.MHA else ("tp",)


def _pool_fields(name: str, geometry: KVGeometry) -> list[tuple[str, str | None]]:
    return [
        ("pool", name),
        ("dtype", geometry.dtype.label),
        ("kind", geometry.kind.value),
        ("layers", str(geometry.num_layers)),
        ("components", ",".join(f"{c.name}:{c.heads}x{c.width}" for c in geometry.components)),
        ("page_tokens", str(geometry.page_tokens)),
        ("rows", str(geometry.rows)),
    ]
