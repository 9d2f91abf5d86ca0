"""Pages that stay on the device between requests, as an engine's own prefix cache keeps them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class DeviceCache:
    """Which device page holds which key; least recently used leave first, leaves before heads.

    Parameters
    ----------
    num_pages : int
        Pages of the device pool; the longest prompt must fit.
    keeps : bool
        Whether pages stay after their request; without, every request begins with an empty device.
    """

    def __init__(self, num_pages: int, *, keeps: bool) -> None:
        self._free = list(range(num_pages))
        self._pages: OrderedDict[bytes, int] = OrderedDict()
        self._keeps = keeps

    def resident(self, keys: Sequence[bytes]) -> int:
        """Count the leading keys whose pages are on the device."""
        return next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))

    def take(self, keys: Sequence[bytes]) -> list[int]:
        """Return a page for each key, those that are there first; others leave to make room."""
        kept = self.resident(keys)
        own = set(keys[:kept])
        missing = len(keys) - kept
        victims = [key for key in self._pages if key not in own][: max(0, missing - len(self._free))]
        for key in victims:
            self._free.append(self._pages.pop(key))
        for key in keys[kept:]:
            if key in self._pages:  # behind a hole: it is written again
                self._free.append(self._pages.pop(key))
        return [self._pages[key] for key in keys[:kept]] + [self._free.pop() for _ in range(missing)]

    def release(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """End a request: its pages are kept, the first of the prompt longest, or given back."""
        for key, page in zip(reversed(keys), reversed(pages), strict=True):
            if self._keeps:
                self._pages[key] = page
                self._pages.move_to_end(key)
            else:
                self._pages.pop(key, None)
                self._free.append(page)
