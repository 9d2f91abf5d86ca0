"""The manifest of an archive: the root group's attributes, written last and checked first."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_tier.errors import FormatVersionError, InvalidArgumentError, StoreError
from hicache_tier.geometry import KVGeometry, PoolKind

from .axes import layout_of
from .codecs import Codec
from .documents import ARCHIVE_FORMAT, ARCHIVE_VERSION, MAX_SHARD_PAGES, PartName, group_document, shard_pages
from .errors import ArchiveError, NotAnArchiveError

if TYPE_CHECKING:
    from hicache_tier.layout import Layout

    from .stores import PartSource

MAX_MANIFEST_NBYTES = 16 << 20
MAX_PAGE_NBYTES = 1 << 30
_MAX_PAGES = 1 << 40
_MAX_PAGE_TOKENS = 4096
_MOST_SECONDS = 1 << 40


def geometry_of(data: Any) -> KVGeometry:  # noqa: ANN401 - whatever a file holds
    """Read a geometry; `InvalidArgumentError` for one that no pool has."""
    geometry = KVGeometry.from_dict(data)
    block = geometry.kind is PoolKind.INDEXER
    heads = {component.heads for component in geometry.components}
    counts = {PoolKind.MHA: 2, PoolKind.MLA: 1, PoolKind.INDEXER: 1}
    if (
        geometry.rows != (1 if block else geometry.page_tokens)
        or len(geometry.components) != counts[geometry.kind]
        or len(heads) != 1
        or (geometry.kind is not PoolKind.MHA and heads != {1})
        or (block and geometry.components[0].width % geometry.page_tokens)
    ):
        raise InvalidArgumentError(f"no {geometry.kind.value} pool has the geometry {data!r}.")
    return geometry


@dataclass(frozen=True, slots=True)
class PartFacts:
    """What the manifest says of one part.

    Attributes
    ----------
    name : PartName
    geometry : KVGeometry
    layout : Layout
    codec : Codec
    pages : int
    shard : int
        Pages a shard.
    stored_nbytes : int
        Bytes of all shards.
    has_tokens : bool
        Whether the index holds token ids.
    """

    name: PartName
    geometry: KVGeometry
    layout: Layout
    codec: Codec
    pages: int
    shard: int
    stored_nbytes: int = 0
    has_tokens: bool = False

    @classmethod
    def of(cls, part: PartSource, pages: int, codec: Codec) -> PartFacts:
        """Return the facts of a part that is not written yet."""
        shard = shard_pages(part.geometry.page_nbytes)
        return cls(part.name, part.geometry, part.layout, codec, pages, shard)

    @property
    def page_axes(self) -> int:
        """Axes of a page in the `pages` array."""
        return len(self.layout.page_shape(self.geometry))

    @property
    def index_tokens(self) -> int | None:
        """Token ids a row of the index holds, or None."""
        return self.geometry.page_tokens if self.has_tokens else None

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of the manifest."""
        return {
            "namespace": self.name.namespace,
            "rank": self.name.rank,
            "pool": self.name.pool,
            "geometry": self.geometry.as_dict(),
            "axis_order": self.layout.page_axes,
            "codec": self.codec.value,
            "pages": self.pages,
            "page_nbytes": self.geometry.page_nbytes,
            "shard_pages": self.shard,
            "stored_bytes": self.stored_nbytes,
            "token_ids": self.has_tokens,
        }

    @classmethod
    def from_dict(cls, data: Any) -> PartFacts:  # noqa: ANN401 - whatever a file holds
        """Check an entry of a manifest.

        Raises
        ------
        ArchiveError
            Naming the first thing that cannot be.
        """
        if not isinstance(data, dict):
            raise ArchiveError(f"the manifest has {str(data)[:80]!r} for a part.")
        name = PartName(*(str(data.get(field))[:200] for field in ("namespace", "rank", "pool")))
        if not name.valid:
            raise ArchiveError(f"the manifest names a part {str(name)!r}, which no store makes.")
        try:
            geometry = geometry_of(data["geometry"])
            layout, codec = layout_of(data["axis_order"]), Codec.parse(data["codec"])
            numbers = [data[field] for field in ("pages", "page_nbytes", "shard_pages", "stored_bytes")]
        except KeyError as error:
            raise ArchiveError(f"{name}: the manifest does not say {error}.") from error
        except (InvalidArgumentError, StoreError) as error:
            raise ArchiveError(f"{name}: {error}") from error
        if any(type(number) is not int for number in numbers):
            raise ArchiveError(f"{name}: the manifest's numbers are {numbers}.")
        pages, page_nbytes, shard, stored = numbers
        if page_nbytes != geometry.page_nbytes or not 0 < page_nbytes <= MAX_PAGE_NBYTES:
            raise ArchiveError(
                f"{name}: a page has {page_nbytes} bytes by the manifest, {geometry.page_nbytes} by its "
                f"geometry, and at most {MAX_PAGE_NBYTES}."
            )
        unfit = layout.why_not(geometry.kind)
        if unfit:
            raise ArchiveError(f"{name}: {unfit}.")
        if not 1 <= pages <= _MAX_PAGES or not 1 <= shard <= MAX_SHARD_PAGES or shard & (shard - 1):
            raise ArchiveError(f"{name}: {pages} pages, {shard} a shard cannot be.")
        if geometry.page_tokens > _MAX_PAGE_TOKENS:
            raise ArchiveError(f"{name}: {geometry.page_tokens} tokens a page cannot be.")
        return cls(name, geometry, layout, codec, pages, shard, stored, data.get("token_ids") is True)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checked manifest: the identities of its namespaces, and its parts in the order of their names."""

    identities: dict[str, dict[str, Any]]
    parts: tuple[PartFacts, ...]
    created: float


def manifest_document(parts: list[PartFacts], identities: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`zarr.json` of the root group."""
    held = {facts.name.namespace for facts in parts}
    return group_document(
        {
            "format": ARCHIVE_FORMAT,
            "version": ARCHIVE_VERSION,
            "created": round(time.time(), 3),
            "namespaces": {name: identity for name, identity in identities.items() if name in held},
            "parts": [facts.as_dict() for facts in sorted(parts, key=lambda facts: facts.name)],
        }
    )


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Check a manifest.

    Raises
    ------
    NotAnArchiveError
        Where it is somebody else's.
    FormatVersionError
        Where it is of a later version.
    ArchiveError
        Naming the first thing in it that cannot be.
    """
    try:
        data = json.loads(raw)["attributes"]["hicache_tier"]
        told, version = data["format"], data["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotAnArchiveError(
            f"{where} is no archive: its zarr.json has no manifest ({error!r})."
        ) from error
    if told != ARCHIVE_FORMAT or type(version) is not int:
        raise NotAnArchiveError(f"{where} is no archive: it says format {told!r} version {version!r}.")
    if version > ARCHIVE_VERSION:
        raise FormatVersionError(
            f"{where} is of archive version {version}; this release reads up to version {ARCHIVE_VERSION}."
        )
    entries, spaces = data.get("parts"), data.get("namespaces")
    if not isinstance(entries, list) or not isinstance(spaces, dict):
        raise ArchiveError(f"{where}: the manifest lists no parts and namespaces.")
    parts = tuple(sorted((PartFacts.from_dict(entry) for entry in entries), key=lambda part: part.name))
    if len({part.name for part in parts}) < len(parts):
        raise ArchiveError(f"{where}: the manifest lists a part twice.")
    for part in parts:
        identity = spaces.get(part.name.namespace)
        if not isinstance(identity, dict):
            raise ArchiveError(f"{where}: the manifest says nothing of namespace {part.name.namespace}.")
        pools = identity.get("pools")
        held = pools.get(part.name.pool) if isinstance(pools, dict) else None
        if held != part.geometry.as_dict() or identity.get("axis_order") != part.layout.page_axes:
            raise ArchiveError(f"{part.name}: its geometry or axis order is not its namespace's.")
    created = data.get("created")
    known = isinstance(created, int | float) and 0 <= created < _MOST_SECONDS
    return Manifest(spaces, parts, float(created) if known else 0.0)
