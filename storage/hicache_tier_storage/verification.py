"""`verify_root`: every record and every checksum of a store, and what damage costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_tier.errors import EncryptionError, StoreError

from .audit import PartitionAudit, follow_losses
from .encryption import EncryptionKey, match_key
from .partition_facts import PartitionFacts
from .survey import survey

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from .partition_files import PartitionPaths

_TOTALS = ("pages", "damaged", "unverifiable", "locked", "unfinished", "changed", "prefix_loss")


def verify_root(
    root: str | os.PathLike[str],
    progress: Callable[[int, int], None] | None = None,
    *,
    encryption: EncryptionKey | str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Check every record, page, slab and document of the store at `root`. Writes nothing.

    Pages are read one by one through the page cache. On a live store a page that changes while it is looked
    at is not damaged; it is counted as `changed`.

    Parameters
    ----------
    root : path
    progress : callable (done, total), optional
        Called as pages are checked.
    encryption : EncryptionKey, path or str, optional
        As of `open_store`. Of pages that are encrypted without it, or with another key, only the records are
        verified: each namespace of a root may have a key of its own.

    Returns
    -------
    dict
        `pages`: committed pages looked at. `damaged`: those that will not be served, or would be served
        wrong, plus one for each damaged file in which no page could be counted. `unverifiable`: pages
        stored without a checksum, or encrypted with a key that was not given; `locked`: the latter alone.
        `unfinished`: slots in the middle of a write, which no reader takes for a page. `prefix_loss`: sound
        pages that no prefix leads to any more because of the damaged ones.
        `partitions`: the same numbers for each, with `namespace, rank, writer, pool`, `details` (a list of
        `{key, slot, reason}`, at most 1000; `details_omitted` counts the rest) and `damage` (files).
        `details`: everything found as `{where, what}`, in words.

    Raises
    ------
    NotAStoreError, FormatVersionError, StoreError
        Where `root` is no store, of a later version, or cannot be read.
    EncryptionError
        Where pages are encrypted, and none with the key given.
    """
    key = EncryptionKey.parse(encryption)
    found = survey(root)
    if key is not None:
        _refuse_useless(key, found.partitions)
    audits: list[PartitionAudit] = []
    problems: list[dict[str, str]] = []
    for space in found.namespaces:
        if space.problem:
            problems.append({"where": space.name, "what": space.problem})
        audits += [PartitionAudit(space.name, paths, key) for paths in space.partitions]
    total = sum(audit.expected() for audit in audits)
    done = 0
    for audit in audits:
        for _ in audit.run():
            done += 1
            if progress is not None:
                progress(min(done, total), total)
    follow_losses(audits)
    reports = [audit.report() for audit in audits]
    totals = {name: sum(report[name] for report in reports) for name in _TOTALS}
    totals["damaged"] += len(problems)
    if progress is not None:
        progress(total, total)
    return {**totals, "partitions": reports, "details": problems + _in_words(reports)}


def _refuse_useless(key: EncryptionKey, partitions: list[PartitionPaths]) -> None:
    """Refuse a key that fits none of the partitions that are encrypted, where there are any."""
    error = None
    for paths in partitions:
        try:
            facts = PartitionFacts.read(paths)
            if facts.encrypted:
                match_key(key, facts.key_check, paths.namespace, paths.root)
                return
        except EncryptionError as refused:
            error = error or refused
        except StoreError:  # damaged, as its audit will tell
            pass
    if error is not None:
        raise error


def _in_words(reports: list[dict[str, Any]]) -> list[dict[str, str]]:
    lines = []
    for report in reports:
        where = f"{report['namespace']}/{report['rank']}-w{report['writer']}/{report['pool']}"
        lines += [{"where": where, "what": what} for what in report["damage"]]
        for detail in report["details"]:
            page = f"{where} slot {detail['slot']}, page {detail['key']}"
            lines.append({"where": page, "what": detail["reason"]})
        if report["details_omitted"]:
            lines.append({"where": where, "what": f"{report['details_omitted']} more damaged pages"})
    return lines
