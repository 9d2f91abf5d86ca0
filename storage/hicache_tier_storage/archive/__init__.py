"""Archives: pages of a store as ordinary, compact Zarr v3, to be moved, kept and read elsewhere."""

from __future__ import annotations

from .conversion import Conversion
from .errors import ArchiveError, ArchiveExistsError, NotAnArchiveError
from .export_report import ExportReport
from .exporting import export_archive
from .import_report import ImportReport
from .importing import import_archive
from .loading import Loaded, load_archive
from .reader import Archive, ArchivePart, open_archive
from .selection import Selection

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
