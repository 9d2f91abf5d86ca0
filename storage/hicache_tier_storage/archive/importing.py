"""`import_archive`: pages of an archive into a store, each of them checked, converted where asked for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_tier.keywords import named_options
from hicache_tier_storage.encryption import EncryptionKey

from .conversion import Conversion
from .import_report import ImportReport
from .import_run import ImportRun
from .pool import default_threads
from .reader import open_archive
from .room import stated_capacity
from .targets import plan_targets
from .warming import free_nbytes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from .reader import Archive


@named_options
def import_archive(
    source: str | Path | Archive,
    root: str | os.PathLike[str],
    *,
    conversion: Conversion | None = None,
    tenants: Sequence[str] = (),
    namespaces: Sequence[str] = (),
    capacity_bytes: int | str | None = None,
    threads: int | None = None,
    to_host: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
    encryption: EncryptionKey | str | os.PathLike[str] | None = None,
) -> ImportReport:
    """Bring the pages of an archive into the store at `root`, which may be new, or in use by a server.

    Each page is checked against its checksum before it is stored; pages that the store has are skipped, and
    none of those it has is pushed out. Where room is short, whole prefixes come first, those used last.

    Parameters
    ----------
    source : path, str or Archive
    root : path
    conversion : Conversion, optional
        What the pages are to become.
    tenants : sequence of str
        Salts of the tenants whose pages are wanted; an archive holds digests only.
    namespaces : sequence of str
        First digits of the namespaces to import; all where there are none.
    capacity_bytes : int or str, optional
        Cap on the root; as its partitions state, or that of `open_store` for a new one.
    threads : int, optional
    to_host : bool
        Then read the pages back through the store, so that they lie in the memory of the machine.
    dry_run : bool
        Only say what would be imported, and refuse what the import would refuse; payloads are not read.
    progress : callable (done, total), optional
        Told bytes of payload of the store.
    encryption : EncryptionKey, path or str, optional
        As of `open_store`: the pages are encrypted in the store.

    Returns
    -------
    ImportReport

    Raises
    ------
    InvalidArgumentError
        For a wrong argument; nothing was touched.
    NotAnArchiveError, FormatVersionError, ArchiveError
        Where the archive is not what an export writes; names the first fault. Nothing was touched.
    StoreError
        Where the store cannot be opened.
    """
    began_s = time.monotonic()
    wanted, key = conversion or Conversion(), EncryptionKey.parse(encryption)
    opened = open_archive(source) if isinstance(source, str | Path) else source
    try:
        report = ImportReport(opened.place.text, str(root), dry_run=dry_run)
        plan = plan_targets(opened, wanted, tenants, namespaces)
        for part, reason in plan.refused:
            report.refuse(str(part.facts.name), None, reason, part.facts.pages)
        path = Path(root).absolute()
        cap = stated_capacity(path) if capacity_bytes is None and path.is_dir() else capacity_bytes
        memory = free_nbytes() if to_host and not dry_run else 0
        for target in plan.targets:
            for piece in target.pieces:
                piece.part.check_index()
        run = ImportRun(
            report,
            path,
            capacity=cap,
            tenants=tenants,
            threads=threads or default_threads(),
            memory=memory,
            progress=progress,
            key=key,
        )
        run.all(plan.targets)
    finally:
        if opened is not source:
            opened.close()
    report.seconds = time.monotonic() - began_s
    return report
