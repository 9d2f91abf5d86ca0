"""Pages of one partition, encrypted and authenticated; FORMAT.md, section 8, is normative.

Each page that is ever written has a key and a nonce of its own. They are derived from the partition's key and
from what its record says of it: slot, generation when it was written, commit sequence, time, random bytes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_tier.errors import EncryptionError, how_to_get

from .encryption import KEY_NBYTES, expand
from .record import AES_256_GCM, RECORD_NBYTES, as_sealed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from .encryption import EncryptionKey

NONCE_NBYTES = 12
TAG_NBYTES = 16
_LABEL = b"hct-page-1"


class PageCipher:
    """Seals and opens the pages of a partition. Thread-safe.

    Parameters
    ----------
    key : EncryptionKey
    partition : Path
        Folder of the partition: its last three names, namespace, rank and pool, are part of what is
        authenticated.

    Raises
    ------
    EncryptionError
        Where the package `cryptography` is not installed.
    """

    def __init__(self, key: EncryptionKey, partition: Path) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise EncryptionError(f"encryption needs cryptography: {how_to_get('encryption')}.") from error
        place = "/".join(partition.parts[-3:])
        self._key = key.for_partition(place)
        self._place = place.encode("ascii") + b"\0"
        self._invalid = InvalidTag
        self._cipher, self._aes, self._gcm = Cipher, algorithms.AES256, modes.GCM

    def prepare(self, records: NDArray[np.void], odd: NDArray[np.uint64]) -> None:
        """Let records say how their pages are encrypted, but for the tags.

        `odd` are the slots' generations while they are written.
        """
        sealed = as_sealed(records)
        sealed["algorithm"] = AES_256_GCM
        sealed["salt"] = np.frombuffer(os.urandom(8 * len(records)), "<u8")
        sealed["sealed_generation"] = odd

    @staticmethod
    def contexts(records: NDArray[np.void], slots: NDArray[np.int64]) -> list[bytes]:
        """Return what each page is bound to: its slot, and what its record says of it for good."""
        raw = records.tobytes()
        starts = range(0, len(raw), RECORD_NBYTES)
        return [
            slot.to_bytes(8, "little")
            + raw[at + 7 : at + 8]
            + raw[at + 16 : at + 92]
            + raw[at + 120 : at + 128]
            for at, slot in zip(starts, slots.tolist(), strict=True)
        ]

    def _begin(self, context: bytes, tag: bytes | None) -> Any:  # noqa: ANN401 - of an optional package
        material = expand(self._key, _LABEL + context, KEY_NBYTES + NONCE_NBYTES)
        mode = self._gcm(material[KEY_NBYTES:]) if tag is None else self._gcm(material[KEY_NBYTES:], tag)
        cipher = self._cipher(self._aes(material[:KEY_NBYTES]), mode)
        work = cipher.encryptor() if tag is None else cipher.decryptor()
        work.authenticate_additional_data(self._place + context)
        return work

    def seal(self, context: bytes, source: Sequence[memoryview], target: memoryview) -> bytes:
        """Encrypt a page's segments, in stored order, to one run of bytes; return the tag."""
        work, at = self._begin(context, None), 0
        for part in source:
            work.update_into(part, target[at : at + len(part)])
            at += len(part)
        work.finalize()
        tag: bytes = work.tag
        return tag

    def open(self, context: bytes, tag: bytes, source: memoryview, targets: Sequence[memoryview]) -> bool:
        """Decrypt a page to its segments; False, and the segments mean nothing, where it is not authentic."""
        work, at = self._begin(context, tag), 0
        for part in targets:
            work.update_into(source[at : at + len(part)], part)
            at += len(part)
        try:
            work.finalize()
        except self._invalid:
            return False
        return True

    def reseal(
        self,
        records: NDArray[np.void],
        slot: int,
        target: int,
        odd: NDArray[np.uint64],
        page: memoryview,
    ) -> bool:
        """Encrypt one page anew, in place, for another slot; False where it is not authentic.

        `records` (an array of one) is changed to that of the other slot, whose generation is `odd`.
        """
        if not self.open_page(records, slot, page):
            return False
        self.prepare(records, odd)
        (context,) = self.contexts(records, np.array([target], np.int64))
        as_sealed(records)["tag"][0] = np.frombuffer(self.seal(context, [page], page), np.uint8)
        return True

    def open_page(self, record: NDArray[np.void], slot: int, page: memoryview) -> bool:
        """Decrypt one page in place, by its record (an array of one); False where it is not authentic."""
        sealed = as_sealed(record)
        if sealed["algorithm"][0] != AES_256_GCM:
            return False
        (context,) = self.contexts(record, np.array([slot], np.int64))
        return self.open(context, sealed["tag"][0].tobytes(), page, [page])
