"""What an archive knows of each page: one row, and the index arrays that the rows become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from hicache_tier_storage.record import KEY_MAX_NBYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROW: Final = np.dtype(
    [
        ("key", "u1", (KEY_MAX_NBYTES,)),
        ("checksum", "<u8"),
        ("parent", "<u8"),
        ("created_ns", "<u8"),
        ("access_s", "<u8"),
        ("tokens", "<u4"),
        ("flags", "<u4"),
        ("key_nbytes", "u1"),
    ]
)
"""One page: its fields as in a slot record of the store; `checksum` is always that of kind 2."""

INDEX_ROWS: Final = 1 << 16
NO_TOKEN: Final = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class IndexArray:
    """One array of a part's index: `[page]`, or `[page, width]` where there is a second dimension."""

    name: str
    dtype: str
    width: int = 0
    dimension: str = ""
    fill_value: int = 0

    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return np.dtype(self.dtype).itemsize * max(1, self.width)


def index_arrays(page_tokens: int | None) -> tuple[IndexArray, ...]:
    """Return the index arrays of a part; `page_tokens` where it holds the token ids of its pages."""
    plain = tuple(
        IndexArray(name, ROW[name].base.name, *((KEY_MAX_NBYTES, "key_byte") if name == "key" else ()))
        for name in sorted(ROW.names or ())
    )
    if page_tokens is None:
        return plain
    return (*plain, IndexArray("token_ids", "uint32", page_tokens, "page_token", NO_TOKEN))


def index_rows(pages: int) -> int:
    """Rows of one chunk of every index array."""
    return max(1, min(pages, INDEX_ROWS))


def rows_of(records: NDArray[np.void]) -> NDArray[np.void]:
    """Return the rows of slot records."""
    rows = np.zeros(len(records), ROW)
    for name in ROW.names or ():
        rows[name] = records[name]
    return rows


def raw_keys(rows: NDArray[np.void]) -> NDArray[np.void]:
    """Keys as padded 32-byte values that sort and compare, `V33`: the length counts too."""
    packed = np.empty((len(rows), KEY_MAX_NBYTES + 1), np.uint8)
    packed[:, :KEY_MAX_NBYTES] = rows["key"]
    packed[:, KEY_MAX_NBYTES] = rows["key_nbytes"]
    keys: NDArray[np.void] = packed.view(f"V{KEY_MAX_NBYTES + 1}").ravel()
    return keys
