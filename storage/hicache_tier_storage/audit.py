"""The check of one partition: records against themselves, payloads against their checksums."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_tier.errors import EncryptionError, FormatVersionError, StoreError

from .capacity import PARTITION_NAME
from .census import SlabCensus, SlotState, stray_slabs, take_census
from .chains import Chains
from .documents import document_problems, read_state
from .inside import ARRAY_FILE, PARTITION_FILE, read_inside
from .metadata import read_attributes
from .page_check import CHANGED, UNVERIFIABLE, PageCheck
from .partition_facts import MAX_TABLE_NBYTES, PartitionFacts
from .record import COMMITTED, RECORD_NBYTES, keys_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .encryption import EncryptionKey
    from .partition_files import PartitionPaths

_MAX_DETAILS = 1000
_TALLIES = ("pages", "damaged", "unverifiable", "locked", "unfinished", "changed", "prefix_loss")


class PartitionAudit:
    """Checks one partition page by page; remembers 17 bytes a page, for the chains.

    Parameters
    ----------
    namespace : str
    paths : PartitionPaths
    key : EncryptionKey, optional
        Used where the pages are encrypted with it.
    """

    def __init__(self, namespace: str, paths: PartitionPaths, key: EncryptionKey | None = None) -> None:
        self._key = key
        match = PARTITION_NAME.fullmatch(paths.root.parent.name)
        self.namespace, self.paths, self.pool = namespace, paths, paths.root.name
        self.rank, self.writer = (match[1], int(match[2])) if match else (paths.root.parent.name, -1)
        self.tally = dict.fromkeys(_TALLIES, 0)
        self.damage: list[str] = []
        self.details: list[dict[str, Any]] = []
        self.heads: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.parents: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.sound: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._details_omitted = 0

    def expected(self) -> int:
        """Count the pages by their records' state alone, for progress."""
        count = 0
        for number in self.paths.slab_numbers():
            with suppress(OSError):
                raw = np.frombuffer(
                    read_inside(self.paths.table(number), ARRAY_FILE, MAX_TABLE_NBYTES), np.uint8
                )
                whole = raw[: len(raw) // RECORD_NBYTES * RECORD_NBYTES].reshape(-1, RECORD_NBYTES)
                count += int((whole[:, 5] == COMMITTED).sum())
        return count

    def run(self) -> Iterator[None]:
        """Check everything, yielding after each page."""
        facts = self._check_files()
        if facts is None:
            return
        for number in self.paths.slab_numbers():
            census = take_census(self.paths, facts, number)
            if census is not None:
                yield from self._check_slab(facts, census)

    def report(self) -> dict[str, Any]:
        """Return what was found, as plain data."""
        return {
            "namespace": self.namespace,
            "rank": self.rank,
            "writer": self.writer,
            "pool": self.pool,
            **self.tally,
            "damage": self.damage,
            "details": self.details,
            "details_omitted": self._details_omitted,
        }

    def _file_damaged(self, what: str) -> None:
        self.damage.append(what)
        self.tally["damaged"] += 1

    def _check_files(self) -> PartitionFacts | None:
        if not (self.paths.root / "zarr.json").exists():
            if self.paths.slab_numbers():
                self._file_damaged("zarr.json is missing; the partition is not served")
            return None
        try:
            facts = PartitionFacts.read(self.paths)
            axis_order = read_attributes(self.paths.root, PARTITION_FILE).get("axis_order")
        except (FormatVersionError, EncryptionError):
            raise
        except StoreError as error:
            self._file_damaged(str(error))
            return None
        if self._key is not None and not self._key.fits(facts.key_check, self.paths.namespace):
            self._key = None
        _, problem = read_state(self.paths, facts)
        problems = [problem] if problem else []
        problems += document_problems(self.paths, facts, axis_order)
        problems += stray_slabs(self.paths, facts.page_axes)
        for what in problems:
            self._file_damaged(what)
        return facts

    def _check_slab(self, facts: PartitionFacts, census: SlabCensus) -> Iterator[None]:
        index, records = census.records(SlotState.COMMITTED)
        wrong, broken = census.records(SlotState.DAMAGED)
        self.tally["unfinished"] += int((census.states == SlotState.UNFINISHED).sum())
        first = census.number * facts.shape.slots
        for at, record in zip(wrong.tolist(), broken, strict=True):
            self._page_damaged(first + at, record["key"].tobytes().rstrip(b"\0"), census.reasons[at])
        self._remember(broken, np.zeros(len(broken), np.bool_))
        self.tally["pages"] += len(broken)
        if census.problem:
            self.damage.append(f"{census.problem}; {len(records)} pages are not served")
            self.tally["damaged"] += not len(records)
            self.tally["pages"] += len(records)
            for at, key in zip(index.tolist(), keys_of(records), strict=True):
                self._page_damaged(first + at, key, census.problem)
                yield
            self._remember(records, np.zeros(len(records), np.bool_))
            return
        sound = np.ones(len(records), np.bool_)
        kept = np.ones(len(records), np.bool_)
        with PageCheck(self.paths, facts, census.number, self._key) as page:
            for i, (at, key) in enumerate(zip(index.tolist(), keys_of(records), strict=True)):
                verdict = page.judge(at, census.words[at])
                if verdict == CHANGED:
                    self.tally["changed"] += 1
                    kept[i] = False
                elif verdict == UNVERIFIABLE:
                    self.tally["unverifiable"] += 1
                    self.tally["locked"] += facts.encrypted
                elif verdict:
                    sound[i] = False
                    self._page_damaged(first + at, key, verdict)
                yield
        self.tally["pages"] += int(kept.sum())
        self._remember(records[kept], sound[kept])

    def _page_damaged(self, slot: int, key: bytes, reason: str) -> None:
        self.tally["damaged"] += 1
        if len(self.details) < _MAX_DETAILS:
            self.details.append({"key": key.hex(), "slot": slot, "reason": reason})
        else:
            self._details_omitted += 1

    def _remember(self, records: NDArray[np.void], sound: NDArray[np.bool_]) -> None:
        heads = np.ascontiguousarray(records["key"][:, :8]).view("<u8").ravel()
        self.heads = np.concatenate([self.heads, heads])
        self.parents = np.concatenate([self.parents, records["parent"].astype(np.uint64)])
        self.sound = np.concatenate([self.sound, sound])


def follow_losses(audits: Sequence[PartitionAudit]) -> None:
    """Fill in `prefix_loss`: sound pages that a prefix led to, and that none leads to without damaged pages.

    Chains are followed over all writers of a rank and pool, which share their pages.
    """
    groups: dict[tuple[str, str, str], list[PartitionAudit]] = {}
    for audit in audits:
        groups.setdefault((audit.namespace, audit.rank, audit.pool), []).append(audit)
    for group in groups.values():
        heads = np.concatenate([audit.heads for audit in group])
        parents = np.concatenate([audit.parents for audit in group])
        sound = np.concatenate([audit.sound for audit in group])
        if sound.all():
            continue
        before = Chains.build(heads, parents).depth[sound]
        after = Chains.build(heads[sound], parents[sound]).depth
        lost = np.zeros(len(sound), np.bool_)
        lost[sound] = (before > 0) & (after == 0)
        ends = np.cumsum([len(audit.heads) for audit in group])
        for audit, end in zip(group, ends.tolist(), strict=True):
            audit.tally["prefix_loss"] = int(lost[end - len(audit.heads) : end].sum())
