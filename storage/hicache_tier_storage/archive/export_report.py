"""What an export did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .manifest import PartFacts


@dataclass(slots=True)
class ExportReport:
    """What an export did, or would do.

    Attributes
    ----------
    destination, codec : str
    pages, nbytes : int
        Pages in the archive, and their payload.
    stored_nbytes : int
        Bytes of the archive's shards.
    resumed_pages : int
        Pages that an earlier, stopped export had written.
    parts : list of dict
        `{namespace, rank, pool, pages, bytes}`.
    left_out : dict
        Pages of the store that are not in the archive, by reason.
    problems : list of str
        What of the store could not be looked at.
    live : bool
        Whether a process was writing to the store.
    dry_run : bool
    seconds : float
    """

    destination: str
    codec: str
    pages: int = 0
    nbytes: int = 0
    stored_nbytes: int = 0
    resumed_pages: int = 0
    parts: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    live: bool = False
    dry_run: bool = False
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; sizes are called `bytes`."""
        names = {"nbytes": "bytes", "stored_nbytes": "stored_bytes"}
        return {names.get(name, name): getattr(self, name) for name in self.__slots__}

    def lose(self, reason: str, count: int) -> None:
        """Count pages that are left out."""
        if count:
            self.left_out[reason] = self.left_out.get(reason, 0) + count

    def add_part(self, facts: PartFacts) -> None:
        """Enter a part."""
        self.pages += facts.pages
        self.nbytes += facts.pages * facts.geometry.page_nbytes
        self.stored_nbytes += facts.stored_nbytes
        name = {"namespace": facts.name.namespace, "rank": facts.name.rank, "pool": facts.name.pool}
        self.parts.append(name | {"pages": facts.pages, "bytes": facts.pages * facts.geometry.page_nbytes})
