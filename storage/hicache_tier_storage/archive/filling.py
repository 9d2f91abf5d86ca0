"""Copying pages of a store into a shard: read, checked, coded, written."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import xxhash

from hicache_tier_storage.census import SlotState, judge, open_file, read_records
from hicache_tier_storage.page_cipher import PageCipher
from hicache_tier_storage.record import CHECKSUM_NONE, CHECKSUM_XXH3, as_records, checksum_seed, keys_of

from .candidates import key_names, split_places
from .rows import ROW, rows_of
from .shard import write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from hicache_tier_storage.record import Words

    from .codecs import Codec
    from .shard import Draft
    from .stores import PartitionSource

_BATCH_NBYTES = 4 << 20
_LOOKS = 4
_LOOK_S = 0.003
_MOST_REST_S = 0.03  # for a run: who had to wait for the processor need not wait again


class StoppedError(Exception):
    """The export was asked to stop; what was published stays."""


@dataclass(frozen=True, slots=True)
class PageSource:
    """Where the pages of a part lie and how they are coded; plain data.

    Attributes
    ----------
    partitions : tuple of PartitionSource
    page_nbytes, itemsize : int
    codec : Codec
    rest : float
        Seconds to stand still for each second of work, so that a server comes first.
    """

    partitions: tuple[PartitionSource, ...]
    page_nbytes: int
    itemsize: int
    codec: Codec
    rest: float = 0.0


@dataclass(slots=True)
class Filled:
    """What became of a call of `fill`.

    Attributes
    ----------
    draft : Draft
    added : int
        Pages appended.
    left_out : dict
        Pages that were not copied, by reason: `changed`, `damaged`.
    """

    draft: Draft
    added: int = 0
    left_out: dict[str, int] = field(default_factory=dict)

    def lose(self, reason: str, count: int) -> None:
        """Count pages that were not copied."""
        if count:
            self.left_out[reason] = self.left_out.get(reason, 0) + count


def fill(
    source: PageSource,
    draft: Draft,
    places: NDArray[np.uint64],
    names: NDArray[np.uint64],
    stopped: Callable[[], bool] = lambda: False,
) -> Filled:
    """Append the pages at `places` whose keys still have these hashes.

    A page that its store gave up or replaced since it was listed is left out, as is one whose bytes are not
    those of its checksum: what is in the draft is exactly what its rows say.

    Raises
    ------
    StoppedError
        Where `stopped` says so; the draft's file is of no use then.
    OSError
        Where the draft cannot be written.
    """
    filled = Filled(draft)
    owners, slots = split_places(places)
    encode = source.codec.encoder(source.itemsize)
    buffer = np.empty(0, np.uint8)
    fd = os.open(draft.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        at = draft.payload_nbytes
        if _is_plain(source) and len(places):
            # The size is known: blocks taken in one go cost less, and lie together.
            os.posix_fallocate(fd, at, len(places) * source.page_nbytes)
        for owner, first, last in _runs(source, owners, slots):
            if stopped():
                raise StoppedError
            began_s = time.monotonic()
            partition = source.partitions[owner]
            stride = partition.facts.shape.stride
            if len(buffer) < (last - first) * stride:
                buffer = np.empty((last - first) * stride, np.uint8)
            with _Slab(partition, int(slots[first])) as slab:
                good, rows = slab.read(buffer, int(slots[first]), names[first:last], filled)
            pages = [encode(buffer[i * stride : i * stride + source.page_nbytes]) for i in good]
            merge = source.page_nbytes == stride and len(good) == last - first and _is_plain(source)
            at += write_all(fd, [buffer[: len(good) * stride]] if merge else pages, at)
            draft.extend(rows, [len(page) for page in pages])
            filled.added += len(rows)
            if source.rest:
                time.sleep(min(_MOST_REST_S, source.rest * (time.monotonic() - began_s)))
    finally:
        os.close(fd)
    return filled


def _is_plain(source: PageSource) -> bool:
    return not source.codec.documents(source.itemsize)[1:]


def _runs(
    source: PageSource, owners: NDArray[np.int64], slots: NDArray[np.int64]
) -> Iterator[tuple[int, int, int]]:
    """Cut places into runs of neighbouring slots of one slab, bounded in bytes: owner, first, last."""
    first = 0
    for at in range(1, len(slots) + 1):
        shape = source.partitions[owners[first]].facts.shape
        if (
            at == len(slots)
            or owners[at] != owners[first]
            or slots[at] != slots[at - 1] + 1
            or slots[at] // shape.slots != slots[first] // shape.slots
            or (at - first + 1) * shape.stride > _BATCH_NBYTES
        ):
            yield int(owners[first]), first, at
            first = at


class _Slab:
    """A slab and its table, open for as long as one run is read."""

    def __init__(self, partition: PartitionSource, slot: int) -> None:
        facts = partition.facts
        self._shape = facts.shape
        number = slot // facts.shape.slots
        self._first = number * facts.shape.slots
        self._paths = (partition.paths.slab(number, facts.page_axes), partition.paths.table(number))
        self._suspect, self._encrypted = partition.suspect, facts.encrypted
        self._cipher = None if partition.key is None else PageCipher(partition.key, partition.paths.root)
        self._files: list[int] = []

    def __enter__(self) -> Self:
        try:
            self._files += [open_file(path) for path in self._paths]
        except OSError:  # a live writer gave the slab up just now
            self.__exit__()
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.pop())

    def read(
        self, buffer: NDArray[np.uint8], slot: int, names: NDArray[np.uint64], filled: Filled
    ) -> tuple[list[int], NDArray[np.void]]:
        """Read consecutive slots, one page a stride; return which are whole, and their rows."""
        count, shape = len(names), self._shape
        if not self._files:
            filled.lose("changed", count)
            return [], np.zeros(0, ROW)
        slab, table = self._files
        words = self._records(table, slot - self._first, count)
        held = self._holds(words, names)
        if not held.any():
            filled.lose("changed", count)
            return [], np.zeros(0, ROW)
        got = _read(slab, buffer[: count * shape.stride], (slot - self._first) * shape.stride)
        records = as_records(words)
        good: list[int] = []
        keys = keys_of(records)
        for i in np.flatnonzero(held).tolist():
            page = buffer[i * shape.stride : i * shape.stride + shape.page_nbytes]
            if got < i * shape.stride + shape.page_nbytes:
                filled.lose("damaged", 1)
                continue
            if self._cipher is not None and self._cipher.open_page(records[i : i + 1], slot + i, page.data):
                records["algorithm"][i] = CHECKSUM_XXH3
                records["checksum"][i] = xxhash.xxh3_64_intdigest(page.data, checksum_seed(keys[i]))
                good.append(i)
                continue
            total = xxhash.xxh3_64_intdigest(page.data, checksum_seed(keys[i]))
            if records["algorithm"][i] == CHECKSUM_XXH3 and total == int(records["checksum"][i]):
                good.append(i)
                continue
            again = self._records(table, slot - self._first + i, 1)
            same = self._holds(again, names[i : i + 1])[0]
            same = same and as_records(again)["sequence"][0] == records["sequence"][i]
            if records["algorithm"][i] == CHECKSUM_NONE and same and not self._suspect:
                records["checksum"][i] = total
                good.append(i)
            else:
                filled.lose("damaged" if same else "changed", 1)
        filled.lose("changed", count - int(held.sum()))
        return good, rows_of(records[good])

    def _records(self, table: int, first: int, count: int) -> Words:
        """Read records; one that is being published just now is looked at again."""
        words = np.zeros((count, 16), np.uint64)
        for look in range(_LOOKS):
            found = read_records(table, first, count)
            words[: len(found)] = found
            if not (as_records(words)["generation"] & 1).any():
                break
            if look + 1 < _LOOKS:
                time.sleep(_LOOK_S)
        return words

    def _holds(self, words: Words, names: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Tell which records are committed and have the key of this hash."""
        states, _ = judge(words, self._shape.page_nbytes, encrypted=self._encrypted)
        records = as_records(words)
        same: NDArray[np.bool_] = key_names(records["key"], records["key_nbytes"]) == names
        same &= states == SlotState.COMMITTED
        return same


def _read(fd: int, buffer: NDArray[Any], offset: int) -> int:
    """Fill a buffer from a file; return how many bytes there were."""
    view, done = buffer.data, 0
    while done < len(view):
        try:
            part = os.preadv(fd, [view[done:]], offset + done)
        except OSError:
            break
        if not part:
            break
        done += part
    return done
