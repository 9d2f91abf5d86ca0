"""What the slots of one slab hold, read with plain reads so that nothing can be changed by looking."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from .inside import ARRAY_FILE, open_inside
from .record import (
    ALGORITHMS,
    BAD,
    COMMITTED,
    FREE,
    KEY_MAX_NBYTES,
    RECORD_NBYTES,
    RECORD_VERSION,
    RECORD_WORDS,
    WRITING,
    Words,
    as_records,
    crc_good,
)
from .table import table_nbytes

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from .partition_facts import PartitionFacts
    from .partition_files import PartitionPaths

_LOOKS = 4  # a record that a live writer publishes just now is whole at the next look
_LOOK_S = 0.003


class SlotState(IntEnum):
    """What a slot's record says, once checked."""

    FREE = 0
    UNFINISHED = 1  # being written, or torn by a kill: not a page yet, not a page any more
    COMMITTED = 2
    BAD = 3  # given up by a writer
    DAMAGED = 4


@dataclass(slots=True)
class SlabCensus:
    """Slots of one slab.

    Attributes
    ----------
    number : int
    words : uint64 [n, 16]
        Records as read; fewer than S where the table was cut.
    states : uint8 [n]
        `SlotState` of each.
    reasons : dict
        Why a record is damaged, by its index.
    problem : str
        Why the store drops the whole slab, or nothing.
    nbytes : int
        Bytes of slab and table.
    """

    number: int
    words: Words
    states: NDArray[np.uint8]
    reasons: dict[int, str]
    problem: str
    nbytes: int

    def records(self, state: SlotState) -> tuple[NDArray[np.intp], NDArray[np.void]]:
        """Return indices and records of the slots in one state."""
        index = np.flatnonzero(self.states == state)
        return index, as_records(self.words[index])


def open_file(path: Path) -> int:
    """Open a slab or a slot table for reading, never through a symbolic link."""
    return open_inside(path, ARRAY_FILE)


def read_records(fd: int, first: int, count: int) -> Words:
    """Read whole records `first..first+count-1`, as far as the file goes."""
    wanted, at, parts = count * RECORD_NBYTES, first * RECORD_NBYTES, []
    while wanted:
        part = os.pread(fd, wanted, at)
        if not part:
            break
        parts.append(part)
        wanted, at = wanted - len(part), at + len(part)
    raw = b"".join(parts)
    whole = len(raw) // RECORD_NBYTES * RECORD_NBYTES
    words = np.frombuffer(bytearray(raw[:whole]), np.uint64)
    return words.reshape(-1, RECORD_WORDS)


def judge(words: Words, page_nbytes: int, *, encrypted: bool) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """Give every record its `SlotState`, and say what is wrong with those that are damaged."""
    records = as_records(words)
    states = np.full(len(records), SlotState.FREE, np.uint8)
    used = words.any(axis=1)
    odd = records["generation"] & 1 == 1
    states[used & odd] = SlotState.UNFINISHED
    index = np.flatnonzero(used & ~odd)
    stable = records[index]
    state, length = stable["state"], stable["key_nbytes"]
    of_state = {FREE: SlotState.FREE, WRITING: SlotState.UNFINISHED, COMMITTED: SlotState.COMMITTED}
    for value, meaning in (of_state | {BAD: SlotState.BAD}).items():
        states[index[state == value]] = meaning
    page = state == COMMITTED
    checks = (
        (~crc_good(stable), "the record's CRC is wrong"),
        (stable["version"] != RECORD_VERSION, "the record is of another version"),
        (state > BAD, "the record is in no known state"),
        (page & ((length < 1) | (length > KEY_MAX_NBYTES)), "the key's length cannot be"),
        (page & (stable["valid_nbytes"] != page_nbytes), "the page is of another length"),
        (
            page & ~np.isin(stable["algorithm"], ALGORITHMS[encrypted]),
            "the page is not encrypted" if encrypted else "the checksum is of an unknown kind",
        ),
    )
    reasons: dict[int, str] = {}
    for wrong, reason in checks:
        for at in index[wrong].tolist():
            reasons.setdefault(at, reason)
    states[list(reasons)] = SlotState.DAMAGED
    return states, reasons


def take_census(paths: PartitionPaths, facts: PartitionFacts, number: int) -> SlabCensus | None:
    """Read the table of one slab and look at the slab's own file.

    Returns
    -------
    SlabCensus or None
        None where the slab is not there (any more).
    """
    shape = facts.shape
    try:
        fd = open_file(paths.table(number))
    except FileNotFoundError:
        return None
    except OSError as error:
        return _unreadable(paths, number, error)
    try:
        size = os.fstat(fd).st_size
        try:
            words = read_records(fd, 0, shape.slots)
        except OSError as error:
            return _unreadable(paths, number, error)
        states, reasons = judge(words, shape.page_nbytes, encrypted=facts.encrypted)
        for _ in range(_LOOKS):
            if not reasons:
                break
            time.sleep(_LOOK_S)
            _look_again(fd, words, states, reasons, facts)
    finally:
        os.close(fd)
    problem = slab_problem(paths, facts, number)
    expected = table_nbytes(shape.slots)
    if size != expected:
        problem = f"slots/{paths.table(number).name} has {size} bytes instead of {expected}"
    elif problem and not words.any() and not paths.slab(number, facts.page_axes).exists():
        problem = ""  # a kill while a slab was being created: it holds nothing
    if problem and not paths.table(number).exists():
        return None
    nbytes = size + _size(paths.slab(number, facts.page_axes))
    return SlabCensus(number, words, states, reasons, problem, nbytes)


def _unreadable(paths: PartitionPaths, number: int, error: OSError) -> SlabCensus:
    """Return what is known of a slab whose table cannot be read."""
    table = paths.table(number)
    problem = f"slots/{table.name} cannot be read: {error.strerror}"
    none = np.zeros((0, RECORD_WORDS), np.uint64)
    return SlabCensus(number, none, np.zeros(0, np.uint8), {}, problem, _size(table))


def _look_again(
    fd: int, words: Words, states: NDArray[np.uint8], reasons: dict[int, str], facts: PartitionFacts
) -> None:
    for at in list(reasons):
        again = read_records(fd, at, 1)
        if len(again):
            words[at] = again[0]
            state, reason = judge(again, facts.shape.page_nbytes, encrypted=facts.encrypted)
            states[at] = state[0]
            del reasons[at]
            if reason:
                reasons[at] = reason[0]


def slab_problem(paths: PartitionPaths, facts: PartitionFacts, number: int) -> str:
    """Say why a slab's file is not what the store made, or return nothing."""
    path, shape = paths.slab(number, facts.page_axes), facts.shape
    name = f"pages/{path.name}"
    try:
        fd = open_file(path)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be opened: {error.strerror}"
    try:
        size = os.fstat(fd).st_size
        if size != shape.file_nbytes:
            return f"{name} has {size} bytes instead of {shape.file_nbytes}"
        tail = shape.tail()
        if os.pread(fd, len(tail), shape.data_nbytes) != tail:
            return f"{name} has a damaged index"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    finally:
        os.close(fd)
    return ""


def stray_slabs(paths: PartitionPaths, page_axes: int) -> list[str]:
    """Names of slabs that have no slot table; the store serves nothing of them."""
    found = []
    for path in sorted(paths.pages.glob("c.*")) if paths.pages.is_dir() else ():
        number = path.name.split(".")[1]
        if number.isdecimal() and path == paths.slab(int(number), page_axes):
            gone = not paths.table(int(number)).exists()
            if gone and path.exists():  # a live writer removes the slab first, then its table
                found.append(f"pages/{path.name} has no slot table")
    return found


def _size(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
