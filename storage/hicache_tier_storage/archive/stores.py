"""Parts of a store as an export sees them: whose pages they are, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hicache_tier.errors import EncryptionError, FormatVersionError, StoreError
from hicache_tier.geometry import KVGeometry
from hicache_tier_storage.capacity import PARTITION_NAME
from hicache_tier_storage.documents import read_state
from hicache_tier_storage.encryption import match_key
from hicache_tier_storage.inside import PARTITION_FILE
from hicache_tier_storage.liveness import live_writers
from hicache_tier_storage.metadata import read_attributes
from hicache_tier_storage.partition_facts import PartitionFacts
from hicache_tier_storage.state import boot_id
from hicache_tier_storage.survey import survey

from .axes import layout_of
from .documents import PartName

if TYPE_CHECKING:
    import os

    from hicache_tier.layout import Layout
    from hicache_tier_storage.encryption import EncryptionKey
    from hicache_tier_storage.partition_files import PartitionPaths
    from hicache_tier_storage.survey import Namespace


@dataclass(frozen=True, slots=True)
class PartitionSource:
    """One writer's partition.

    Attributes
    ----------
    paths : PartitionPaths
    facts : PartitionFacts
    suspect : bool
        Whether power loss may have touched it: its pages without a checksum are not served, nor exported.
    key : EncryptionKey or None
        The one given, where its pages are encrypted; whether it is theirs is not checked yet.
    """

    paths: PartitionPaths
    facts: PartitionFacts
    suspect: bool
    key: EncryptionKey | None = None


@dataclass(slots=True)
class PartSource:
    """The partitions of one rank and pool, which hold interchangeable pages.

    Attributes
    ----------
    name : PartName
    geometry : KVGeometry
    layout : Layout
        One that stores pages in this order of axes.
    identity : dict
        Of the namespace.
    partitions : list of PartitionSource
    """

    name: PartName
    geometry: KVGeometry
    layout: Layout
    identity: dict[str, Any]
    partitions: list[PartitionSource] = field(default_factory=list)


@dataclass(slots=True)
class StoreParts:
    """All parts of a store, what of it cannot be exported, and whether a process writes to it now."""

    parts: list[PartSource]
    problems: list[str]
    live: bool


def store_parts(root: str | os.PathLike[str], key: EncryptionKey | None = None) -> StoreParts:
    """Look at a store's folders and documents; reads no page and writes nothing.

    Raises
    ------
    NotAStoreError, FormatVersionError, StoreError
        Where `root` is no store, of a later version, or cannot be read.
    """
    found = survey(root)
    live = live_writers(found.root, found.partitions)
    parts: dict[PartName, PartSource] = {}
    problems: list[str] = []
    for space in found.namespaces:
        if space.problem:
            problems.append(f"{space.name}: {space.problem}")
            continue
        for paths in space.partitions:
            try:
                _add(parts, space, paths, key)
            except FormatVersionError:
                raise
            except StoreError as error:
                problems.append(f"{paths.root.relative_to(found.root)}: {error}")
    writing = any(live[source.paths.root] for part in parts.values() for source in part.partitions)
    return StoreParts([parts[name] for name in sorted(parts)], problems, writing)


def _add(
    parts: dict[PartName, PartSource], space: Namespace, paths: PartitionPaths, key: EncryptionKey | None
) -> None:
    if not (paths.root / "zarr.json").exists() and not paths.slab_numbers():
        return  # being created, or left by a kill before it held anything
    facts = PartitionFacts.read(paths)
    match = PARTITION_NAME.fullmatch(paths.root.parent.name)
    name = PartName(space.name, match[1] if match else facts.rank, paths.root.name)
    told = space.identity.get("pools", {}).get(name.pool)
    if told is None or KVGeometry.from_dict(told) != facts.geometry:
        raise StoreError(f"its geometry is not that of the namespace's pool {name.pool!r}.")
    order = read_attributes(paths.root, PARTITION_FILE).get("axis_order")
    if order != space.identity.get("axis_order"):
        raise StoreError(f"its axis order {order!r} is not the namespace's.")
    state, problem = read_state(paths, facts)
    suspect = state is None or bool(problem) or not (state.clean or state.boot_id == boot_id())
    part = parts.setdefault(name, PartSource(name, facts.geometry, layout_of(order), space.identity))
    part.partitions.append(PartitionSource(paths, facts, suspect, key if facts.encrypted else None))


def check_keys(part: PartSource, parts: list[PartSource]) -> None:
    """Refuse a part whose pages are encrypted with a key that was not given.

    Raises
    ------
    EncryptionError
        Naming those of `parts` that can be read.
    """
    try:
        _match_keys(part)
    except EncryptionError as error:
        others = dict.fromkeys(one.name.namespace for one in parts if _readable(one))
        names = " ".join(f"--namespace {space}" for space in others)
        raise EncryptionError(f"{error} Or leave it out: {names}." if names else str(error)) from error


def _readable(part: PartSource) -> bool:
    try:
        _match_keys(part)
    except EncryptionError:
        return False
    return True


def _match_keys(part: PartSource) -> None:
    for source in part.partitions:
        if source.facts.encrypted:
            match_key(source.key, source.facts.key_check, part.name.namespace, source.paths.root)
