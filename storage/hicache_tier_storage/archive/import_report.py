"""What an import did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_MOST_DETAILS = 1000


@dataclass(slots=True)
class ImportReport:
    """What an import did, or would do. Pages are those of the store, after conversion.

    Attributes
    ----------
    source : str
    root : str
    imported, already_stored : int
    nbytes : int
        Payload of the pages imported.
    refused : dict
        Pages of the archive that made none, by reason.
    details : list of dict
        `{part, key, reason}` of the first 1000 of them; `details_omitted` counts the rest.
    parts : list of dict
        `{namespace, rank, pool, imported, already_stored}` of the store.
    host_pages, host_nbytes : int
        Pages that were read back into memory, and their payload.
    dry_run : bool
    seconds : float
    """

    source: str
    root: str
    imported: int = 0
    already_stored: int = 0
    nbytes: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    details: list[dict[str, str]] = field(default_factory=list)
    details_omitted: int = 0
    parts: list[dict[str, Any]] = field(default_factory=list)
    host_pages: int = 0
    host_nbytes: int = 0
    dry_run: bool = False
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; sizes are called `bytes`."""
        names = {"nbytes": "bytes", "host_nbytes": "host_bytes"}
        return {names.get(name, name): getattr(self, name) for name in self.__slots__}

    def refuse(self, part: str, key: bytes | None, reason: str, count: int = 1) -> None:
        """Enter a page, or all pages of a part."""
        kind = reason.partition(":")[0]
        self.refused[kind] = self.refused.get(kind, 0) + count
        if len(self.details) < _MOST_DETAILS:
            name = "all" if key is None else key.hex()
            self.details.append({"part": part, "key": name, "reason": reason})
        else:
            self.details_omitted += count
