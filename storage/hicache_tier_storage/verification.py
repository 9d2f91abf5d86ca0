"""`verify_root`: every record and every checksum of a store, and what damage costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .audit import PartitionAudit, follow_losses
from .encryption import EncryptionKey
from .survey import survey

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

_TOTALS = ("pages", "damaged", "unverifiable", "unfinished", "changed", "prefix_loss")


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
        As of `open_store`. Without it pages that are encrypted cannot be verified, only their records.

    Returns
    -------
    dict
        `pages`: committed pages looked at. `damaged`: those that will not be served, or would be served
        wrong, plus one for each damaged file in which no page could be counted. `unverifiable`: pages
        stored without a checksum, or encrypted where no key was given. `unfinished`: slots in the middle of
        a write, which no reader takes for a page. `prefix_loss`: sound pages that no prefix leads to any more
        because of the damaged ones.
        `partitions`: the same numbers for each, with `namespace, rank, writer, pool`, `details` (a list of
        `{key, slot, reason}`, at most 1000; `details_omitted` counts the rest) and `damage` (files).
        `details`: everything found as `{where, what}`, in words.

    Raises
    ------
    NotAStoreError, FormatVersionError, StoreError
        Where `root` is no store, of a later version, or cannot be read.
    EncryptionError
        Where pages are encrypted with another key than the one given.
    """
    key = EncryptionKey.parse(encryption)
    found = survey(root)
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
