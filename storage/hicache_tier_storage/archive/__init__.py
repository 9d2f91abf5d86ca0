"""Archives: pages of a store as ordinary, compact Zarr v3, to be moved, kept and read elsewhere."""

from __future__ import annotations

from .errors import ArchiveError, ArchiveExistsError, NotAnArchiveError
from .exporting import ExportReport, export_archive
from .importing import ImportReport, import_archive
from .loading import Loaded, load_archive
from .reader import Archive, ArchivePart, open_archive
from .selection import Selection
from .targets import Conversion

__all__ = [
    "Archive",
    "ArchiveError",
    "ArchiveExistsError",
    "ArchivePart",
    "Conversion",
    "ExportReport",
    "ImportReport",
    "Loaded",
    "NotAnArchiveError",
    "Selection",
    "export_archive",
    "import_archive",
    "load_archive",
    "open_archive",
]
