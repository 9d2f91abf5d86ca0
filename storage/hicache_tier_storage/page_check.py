"""The check of one stored page against its record, which a live writer may change meanwhile."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import xxhash

from .census import SlotState, judge, open_file, read_records
from .page_cipher import PageCipher
from .record import CHECKSUM_XXH3, RECORD_WORDS, SEQUENCE_WORD, as_records, checksum_seed, keys_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .encryption import EncryptionKey
    from .partition_facts import PartitionFacts
    from .partition_files import PartitionPaths

CHANGED: Final = "changed"
UNVERIFIABLE: Final = "unverifiable"
_LOOKS = 4


class PageCheck:
    """Reads pages of one slab and compares them with their records; memory for one page.

    Parameters
    ----------
    paths : PartitionPaths
    facts : PartitionFacts
    number : int
        Of the slab.
    key : EncryptionKey, optional
        Without it pages that are encrypted are `UNVERIFIABLE`.
    """

    def __init__(
        self, paths: PartitionPaths, facts: PartitionFacts, number: int, key: EncryptionKey | None = None
    ) -> None:
        self._facts, self._shape = facts, facts.shape
        self._first = number * facts.shape.slots
        self._cipher = PageCipher(key, paths.root) if key is not None and facts.encrypted else None
        self._paths = (paths.slab(number, facts.page_axes), paths.table(number))
        self._files: list[int] = []
        self._buffer = memoryview(bytearray(facts.shape.page_nbytes))

    def __enter__(self) -> Self:
        with suppress(FileNotFoundError):  # a live writer gave the slab up just now
            for path in self._paths:
                self._files.append(open_file(path))
            os.posix_fadvise(self._files[0], 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.pop())

    def judge(self, at: int, words: NDArray[np.uint64]) -> str:
        """Read the page at index `at` of the slab, whose record was `words` when it was last seen.

        Returns
        -------
        str
            Nothing for a sound page, `UNVERIFIABLE` where it has no checksum or is encrypted with a key that
            was not given, `CHANGED` where the slot does not hold that page any more, or what is wrong with
            it.
        """
        if len(self._files) < len(self._paths):
            return CHANGED
        slab, table = self._files
        for _ in range(_LOOKS):
            reason = self._compare(slab, at, as_records(words.reshape(1, RECORD_WORDS)))
            if reason in {"", UNVERIFIABLE}:
                return reason
            again = read_records(table, at, 1)
            if np.array_equal(again, words[None]):
                return reason
            states, _ = judge(again, self._shape.page_nbytes, encrypted=self._facts.encrypted)
            same = len(again) == 1 and again[0, SEQUENCE_WORD] == words[SEQUENCE_WORD]
            if not same or states[0] != SlotState.COMMITTED:
                return CHANGED
            words = again[0]  # only its access time or a flag was published anew
        return CHANGED

    def _compare(self, slab: int, at: int, record: NDArray[np.void]) -> str:
        done, wanted = 0, self._shape.page_nbytes
        while done < wanted:
            try:
                got = os.preadv(slab, [self._buffer[done:]], at * self._shape.stride + done)
            except OSError as error:
                return f"the page cannot be read: {error.strerror}"
            if not got:
                return f"only {done} of {wanted} bytes can be read"
            done += got
        if self._cipher is not None:
            good = self._cipher.open_page(record, self._first + at, self._buffer)
            return "" if good else "the page is not authentic"
        if record["algorithm"][0] != CHECKSUM_XXH3:
            return UNVERIFIABLE
        seed = checksum_seed(keys_of(record)[0])
        if xxhash.xxh3_64_intdigest(self._buffer, seed) == int(record["checksum"][0]):
            return ""
        return "the payload's checksum is wrong"
