"""Counters by reason."""

from __future__ import annotations

from collections import defaultdict


class Counters:
    """Sums under dotted names, such as `writes.dropped.queue_full`; the tier's lock guards them."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(int)

    def add(self, name: str, amount: float = 1) -> None:
        """Add `amount` to the counter `name`; nothing appears for an amount of zero."""
        if amount:
            self._sums[name] += amount

    def nested(self) -> dict[str, dict[str, object]]:
        """Return plain nested data: group -> counter -> sum, or -> reason -> sum."""
        out: dict[str, dict[str, object]] = {}
        for name, value in sorted(self._sums.items()):
            group, counter, *reason = name.split(".", 2)
            if reason:
                by_reason = out.setdefault(group, {}).setdefault(counter, {})
                assert isinstance(by_reason, dict)  # noqa: S101 - a name never is both a sum and a group
                by_reason[reason[0]] = value
            else:
                out.setdefault(group, {})[counter] = value
        return out
