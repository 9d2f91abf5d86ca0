"""Names and `zarr.json` documents of an archive."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hicache_tier_storage.metadata import component_table

from .rows import index_arrays, index_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .manifest import PartFacts

MANIFEST: Final = "zarr.json"
STATE: Final = ".hct-export"  # what a resumed export needs to know; gone from a finished archive
ARCHIVE_FORMAT: Final = "hct-archive"
ARCHIVE_VERSION: Final = 1
SHARD_NBYTES: Final = 128 << 20
MAX_SHARD_PAGES: Final = 1 << 20
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_RANK = re.compile(r"[a-z]{2}\d{1,6}of\d{1,6}(?:-[a-z]{2}\d{1,6}of\d{1,6}){0,2}", re.ASCII)
_POOL = re.compile(r"[A-Za-z0-9_]{1,32}", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class PartName:
    """Pages of one pool of one rank, all writers together: the unit that an archive keeps apart."""

    namespace: str
    rank: str
    pool: str

    @property
    def path(self) -> str:
        """Folder of the part within the archive."""
        return f"{self.namespace}/{self.rank}/{self.pool}"

    @property
    def valid(self) -> bool:
        """Whether the names are those of the format, so that the path stays in the archive."""
        fields = ((_NAMESPACE, self.namespace), (_RANK, self.rank), (_POOL, self.pool))
        return all(isinstance(text, str) and pattern.fullmatch(text) for pattern, text in fields)

    def __str__(self) -> str:
        return self.path


def foreign_names(names: Iterable[str]) -> list[str]:
    """Return the first parts of names below an archive's root that no archive has."""
    heads = {name.partition("/")[0] for name in names}
    return sorted(head for head in heads - {MANIFEST, STATE} if not _NAMESPACE.fullmatch(head))


def shard_pages(page_nbytes: int) -> int:
    """Pages a shard: a power of two, about 128 MiB."""
    return min(MAX_SHARD_PAGES, 1 << max(0, (SHARD_NBYTES // page_nbytes).bit_length() - 1))


def shard_name(number: int, page_axes: int) -> str:
    """File of a shard within `pages`."""
    return f"c.{number}" + ".0" * page_axes


def group_document(attributes: dict[str, Any] | None = None) -> dict[str, Any]:
    """`zarr.json` of a group."""
    own = {"hicache_tier": attributes} if attributes else {}
    return {"zarr_format": 3, "node_type": "group", "attributes": own}


def part_document(facts: PartFacts) -> dict[str, Any]:
    """`zarr.json` of a part's group; it repeats those of its arrays, so that readers open it in one go."""
    arrays = array_documents(facts)
    consolidated = {"kind": "inline", "must_understand": False, "metadata": arrays}
    return group_document(facts.as_dict()) | {"consolidated_metadata": consolidated}


def array_documents(facts: PartFacts) -> dict[str, dict[str, Any]]:
    """`zarr.json` of each array of a part, by name."""
    return {"pages": pages_document(facts), **index_documents(facts.pages, facts.index_tokens)}


def pages_document(facts: PartFacts) -> dict[str, Any]:
    """`zarr.json` of the `pages` array, `[page, *page_shape]`: one inner chunk a page."""
    geometry, layout = facts.geometry, facts.layout
    shape = list(layout.page_shape(geometry))
    sharding = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [1, *shape],
            "codecs": facts.codec.documents(geometry.dtype.itemsize),
            "index_codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
            "index_location": "end",
        },
    }
    names = ["page", *layout.page_dimension_names(geometry)]
    attributes = {
        "logical_dtype": geometry.dtype.label,
        "page_nbytes": geometry.page_nbytes,
        "components": component_table(geometry, layout),
    }
    return {
        **_array([facts.pages, *shape], [facts.shard, *shape], names, [sharding]),
        "data_type": geometry.dtype.storage if geometry.uniform else "uint8",
        "attributes": {"hicache_tier": attributes},
    }


def index_documents(pages: int, page_tokens: int | None) -> dict[str, dict[str, Any]]:
    """`zarr.json` of each index array, by name: plain chunks with a CRC32C."""
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    found = {}
    for array in index_arrays(page_tokens):
        width, names = ([array.width], [array.dimension]) if array.width else ([], [])
        document = _array([pages, *width], [index_rows(pages), *width], ["page", *names], codecs)
        found[array.name] = document | {"data_type": array.dtype, "fill_value": array.fill_value}
    return found


def _array(shape: list[int], chunk: list[int], names: list[str], codecs: list[Any]) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": codecs,
        "dimension_names": names,
        "attributes": {},
    }
