"""When the pages of a partition were last used: as it is, and as their records say."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class UseTimes:
    """Times of use in seconds, one a slot.

    Attributes
    ----------
    used : uint64, one a slot
        As it is.
    stated : uint64, one a slot
        As the records say.
    """

    def __init__(self) -> None:
        self.used: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.stated: NDArray[np.uint64] = np.zeros(0, np.uint64)

    def resize(self, extra: int) -> None:
        """Have room for so many more slots."""
        self.used = np.concatenate([self.used, np.zeros(extra, np.uint64)])
        self.stated = np.concatenate([self.stated, np.zeros(extra, np.uint64)])

    def touch(self, slots: NDArray[np.int64]) -> None:
        """Take note that pages are used now."""
        self.used[slots] = int(time.time())

    def late(self, older_than_s: int, most: int | None) -> NDArray[np.int64]:
        """Return the slots whose time of use is more than so many seconds from what is stated.

        Earlier counts too: the clock may have been put right. With `most`, only so many: those whose records
        are oldest.
        """
        apart = np.maximum(self.used, self.stated) - np.minimum(self.used, self.stated)
        late = np.flatnonzero(apart > older_than_s)
        if most is not None and len(late) > most:
            late = late[np.argpartition(self.stated[late], most)[:most]]
        return late

    def put_in_order(self, slots: NDArray[np.int64], ticks: NDArray[np.int64]) -> None:
        """Have times of use agree with the order of use where the clock was put back meanwhile."""
        now_s = int(time.time())
        if self.used[slots].max(initial=0) <= now_s:
            return
        slots = slots[np.argsort(-ticks[slots], kind="stable")]  # most recent first
        stated = np.concatenate([[now_s], self.used[slots].astype(np.int64)])
        agreed = np.minimum.accumulate(stated)
        agreed = np.minimum.accumulate(agreed - (agreed < stated))[1:]
        self.used[slots] = np.maximum(agreed, 0).astype(np.uint64)


def past_uses(records: NDArray[np.void]) -> NDArray[np.uint64]:
    """Return times of last access, in seconds, none in the future: a clock was ahead where a record says so.

    Such pages count as used before the first page that was stored after the clock was put right.
    """
    access: NDArray[np.uint64] = records["access_s"].copy()
    now_s = np.uint64(time.time())
    ahead = access > now_s
    if ahead.any():
        created, sequence = records["created_ns"] // np.uint64(1_000_000_000), records["sequence"]
        last = sequence[created > now_s].max(initial=0)
        since = created[(created <= now_s) & (sequence > last)] if last else created[:0]
        access[ahead] = since.min(initial=now_s) - np.uint64(1)
    return access
