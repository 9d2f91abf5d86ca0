"""Slot records: 128 bytes a slot, packed and checked a batch at a time.

Batches are `uint64 [n, 16]` arrays: word 0 holds CRC, version, state, algorithm and key length; word 1 the
generation; the rest follows the table in FORMAT.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import google_crc32c
import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

RECORD_NBYTES = 128
RECORD_WORDS = RECORD_NBYTES // 8
RECORD_VERSION = 1
KEY_MAX_NBYTES = 32

FREE, WRITING, COMMITTED, BAD = range(4)
CHECKSUM_NONE, CHECKSUM_XXH3, AES_256_GCM = 0, 2, 3
ALGORITHMS = {False: (CHECKSUM_NONE, CHECKSUM_XXH3), True: (AES_256_GCM,)}
"""What records of pages may have, by whether the pages are encrypted."""
FLAG_PINNED, FLAG_FROM_GPU = 1, 2

RECORD_DTYPE = np.dtype(
    [
        ("crc", "<u4"),
        ("version", "u1"),
        ("state", "u1"),
        ("algorithm", "u1"),
        ("key_nbytes", "u1"),
        ("generation", "<u8"),
        ("key", "u1", (KEY_MAX_NBYTES,)),
        ("sequence", "<u8"),
        ("checksum", "<u8"),
        ("valid_nbytes", "<u4"),
        ("epoch", "<u4"),
        ("created_ns", "<u8"),
        ("parent", "<u8"),
        ("tokens", "<u4"),
        ("flags", "<u4"),
        ("access_s", "<u8"),
        ("reserved", "u1", (24,)),
    ]
)
SEALED_DTYPE = np.dtype(
    {
        "names": ["algorithm", "salt", "tag", "sealed_generation"],
        "formats": ["u1", "<u8", ("u1", (16,)), "<u8"],
        "offsets": [6, 56, 104, 120],
        "itemsize": RECORD_NBYTES,
    }
)
"""What a record says instead of a checksum where its page is encrypted."""

_COVERED_DTYPE = np.dtype(
    {"names": ["bytes"], "formats": [f"V{RECORD_NBYTES - 4}"], "offsets": [4], "itemsize": RECORD_NBYTES}
)

GENERATION_WORD, SEQUENCE_WORD, ACCESS_WORD = 1, 6, 12
KEY_WORDS = slice(2, 2 + KEY_MAX_NBYTES // 8)

Words = np.ndarray[tuple[int, int], np.dtype[np.uint64]]


def new_records(count: int) -> NDArray[np.void]:
    """Return `count` zeroed records of this version."""
    records = np.zeros(count, RECORD_DTYPE)
    records["version"] = RECORD_VERSION
    return records


def as_words(records: NDArray[np.void]) -> Words:
    """View records as `uint64 [n, 16]`."""
    return records.view("<u8").reshape(-1, RECORD_WORDS)


def as_records(words: Words) -> NDArray[np.void]:
    """View `uint64 [n, 16]` (C order) as records."""
    return words.view(RECORD_DTYPE).reshape(-1)


def as_sealed(records: NDArray[np.void]) -> NDArray[np.void]:
    """View records of encrypted pages by the fields that these alone have."""
    return records.view(SEALED_DTYPE)


def key_field(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    """Zero-padded keys, `uint8 [n, 32]`."""
    padded = np.array(keys, f"S{KEY_MAX_NBYTES}")
    return padded.view(np.uint8).reshape(-1, KEY_MAX_NBYTES)


def key_lengths(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    """Lengths of keys, `uint8 [n]`."""
    return np.fromiter(map(len, keys), np.uint8, len(keys))


def key_head(key: bytes) -> int:
    """First 8 bytes of a key as stored in a child's `parent` field."""
    return int.from_bytes(key[:8].ljust(8, b"\0"), "little")


def key_heads(records: NDArray[np.void]) -> NDArray[np.uint64]:
    """First 8 bytes of the records' keys, as their children's `parent` field holds them."""
    heads: NDArray[np.uint64] = as_words(records)[:, KEY_WORDS.start].copy()
    return heads


def _crc(records: NDArray[np.void]) -> NDArray[np.uint32]:
    """CRC32C of the bytes 4..127 of each record."""
    covered = records.view(_COVERED_DTYPE)["bytes"].tolist()
    return np.array(list(map(google_crc32c.value, covered)), np.uint32)


def seal(records: NDArray[np.void]) -> None:
    """Fill in each record's CRC32C of its bytes 4..127."""
    records["crc"] = _crc(records)


def crc_good(records: NDArray[np.void]) -> NDArray[np.bool_]:
    """Tell which records carry the CRC of their bytes."""
    good: NDArray[np.bool_] = records["crc"] == _crc(records)
    return good


def committed(records: NDArray[np.void], page_nbytes: int, *, encrypted: bool = False) -> NDArray[np.bool_]:
    """Tell which records are stable, committed, of this version and whole.

    Where pages are encrypted no other page is one: nothing is served that nobody authenticated.
    """
    good: NDArray[np.bool_] = (
        (records["state"] == COMMITTED)
        & (records["generation"] & 1 == 0)
        & (records["version"] == RECORD_VERSION)
        & (records["valid_nbytes"] == page_nbytes)
        & (records["key_nbytes"] >= 1)
        & (records["key_nbytes"] <= KEY_MAX_NBYTES)
        & _has_any(records["algorithm"], ALGORITHMS[encrypted])
    )
    if good.all():
        good &= crc_good(records)
    elif good.any():
        good[good] = crc_good(records[good])
    return good


def _has_any(column: NDArray[np.uint8], values: tuple[int, ...]) -> NDArray[np.bool_]:
    """As `numpy.isin`, for few values."""
    has = np.zeros(len(column), np.bool_)
    for value in values:
        has |= column == value
    return has


def keys_of(records: NDArray[np.void]) -> list[bytes]:
    """Keys of records, as given to `put` (longer ones as their digest)."""
    raw = records["key"].tobytes()
    lengths = records["key_nbytes"].tolist()
    return [raw[at : at + n] for at, n in zip(range(0, len(raw), KEY_MAX_NBYTES), lengths, strict=True)]


def checksum_seed(key: bytes) -> int:
    """Seed that binds a page's checksum to its key: XXH3-64 of the key, seeded with the key's length."""
    return xxhash.xxh3_64_intdigest(key, len(key))
