"""Which engine takes a plan: from measurements, of this machine where there are any, else of an H200.

A measurement says what share of a contiguous copy each engine reached for so many bytes of one kind of
transfer. Those of the nearest kind decide: what a transfer costs lies on lines between them. Among engines
that come close to the best, the one that costs a busy device least is taken.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hicache_tier.errors import InvalidArgumentError

from .copy_engine import STEADY_NBYTES
from .memo import PairMemo
from .nvrtc import cache_folder
from .runs import fragments_of
from .staged import windows_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .plan import CopyPlan, RowMap

FORMAT = 1
BUSY_ORDER = ("copy_engine", "staged", "cuda")
"""Engines by what they cost kernels that run beside them, least first."""
CLOSE = 0.06
"""Share of the best engine's speed by which others may fall behind and still count as equal to it.

On a busy one the DMA units keep the whole link and slow products down by 0 to 3 %, where a kernel that
reads host memory keeps 0.7 of it and costs 4 to 5 %, and one that writes it 0.5 at 4 % or 0.9 at 70 %
(H200, bf16 products of 8192^3), so a little is worth giving up for them."""
BRIEF_NBYTES = 64 << 20
"""Below, a transfer is over within a millisecond, whatever it costs others meanwhile: the fastest takes it.

The copy engine keeps the submitting thread busy for as long as that, and where its core is slow the link
waits: 256 tokens of a model of 8 B took 0.8 ms on a quiet H200 machine and 5 to 6 ms on two busy ones."""
LONG_NBYTES = 64 << 10
"""Fragments this long fill the link; whether pages follow one another need not be looked at."""
_MOST = 1 << 62
_FAR = 2.5
"""Distance, in powers of two, beyond which a measurement says nothing."""


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """What of a plan the choice depends on.

    Attributes
    ----------
    direction : str
        `backup` or `load`.
    fragment_nbytes : int
        Mean bytes contiguous on both sides, what one DMA range moves; pages that follow one another count as
        one where they are short.
    count : int
        How many of them there are.
    window_nbytes : int
        Bytes of host memory that one DMA range could move if a kernel rearranged them on the device; 0 where
        pages do not fill stretches of their own.
    on_device : bool
        Whether page numbers are on the device.
    brief : bool
        Whether all layers of these pages, not only those that move now, are less than `BRIEF_NBYTES`.
    """

    direction: str
    fragment_nbytes: int
    count: int
    window_nbytes: int = 0
    on_device: bool = False
    brief: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.fragment_nbytes * self.count

    @classmethod
    def of(cls, plan: CopyPlan, maps: tuple[RowMap, RowMap] | None = None) -> Self:
        """Read the facts off a plan; `maps` are source and destination where only some layers move."""
        source, destination = maps or (plan.source, plan.destination)
        backup = source.device.type == "cuda"
        smallest, whole, window_nbytes = _lengths(
            *((destination, source) if backup else (source, destination))
        )
        on_device = plan.indices_on_device
        pages = runs = max(1, plan.count)
        ours, theirs = plan.numbers
        if whole and pages > 1 and smallest < LONG_NBYTES and ours is not None and theirs is not None:
            follows = (ours[1:] - ours[:-1] == 1) & (theirs[1:] - theirs[:-1] == 1)
            runs = pages - int(np.count_nonzero(follows))
        nbytes = smallest * pages // runs
        direction = "backup" if backup else "load"
        count = max(1, plan.count * source.page_nbytes // nbytes)
        return cls(direction, nbytes, count, window_nbytes, on_device, plan.nbytes < BRIEF_NBYTES)


def _find_lengths(near: RowMap, far: RowMap) -> tuple[int, bool, int]:
    """Return the smallest fragment, whether it is a whole page, and the smallest window or 0."""
    smallest = fragments_of(near, far).smallest
    windows = min((window.nbytes for window in windows_of(near, far)), default=0)
    return smallest.nbytes, smallest.whole, windows


_lengths = PairMemo(_find_lengths)


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine and why it was taken."""

    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """What engines reached for one kind of transfer.

    Attributes
    ----------
    direction, fragment_nbytes, count, window_nbytes
        As of `PlanFacts`.
    ratios : dict[str, float]
        By engine: GB/s over those of a contiguous copy in the same direction and the same run.
    """

    direction: str
    fragment_nbytes: int
    count: int
    window_nbytes: int
    ratios: Mapping[str, float]

    @property
    def nbytes(self) -> int:
        """Bytes that moved."""
        return self.fragment_nbytes * self.count

    @property
    def kind(self) -> tuple[str, int, int]:
        """What measurements of more and fewer bytes have in common."""
        return self.direction, self.fragment_nbytes, self.window_nbytes

    def distance(self, facts: PlanFacts) -> float:
        """Return how far off the kind is, in powers of two; infinite where the two do not compare."""
        if self.direction != facts.direction or bool(self.window_nbytes) != bool(facts.window_nbytes):
            return float("inf")
        return (
            abs(log2(self.fragment_nbytes / facts.fragment_nbytes))
            + abs(log2(max(1, self.window_nbytes) / max(1, facts.window_nbytes))) / 4
        )


@dataclass(frozen=True, slots=True)
class CalibrationTable:
    """Measurements of one kind of device.

    Attributes
    ----------
    device : str
        Its name.
    measurements : tuple[Measurement, ...]
    """

    device: str
    measurements: tuple[Measurement, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; raises `InvalidArgumentError` for anything else."""
        try:
            data: dict[str, Any] = json.loads(text)
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}")  # noqa: TRY301 - one way out for all faults
            rows = tuple(_measurement(row) for row in data["measurements"])
            return cls(str(data["device"]), rows)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidArgumentError(f"not a calibration table: {error!r}"[:300]) from error

    def to_json(self) -> str:
        """Return the table as text."""
        rows = ",\n".join(f"  {json.dumps(asdict(row))}" for row in self.measurements)
        head = f'"format": {FORMAT},\n "device": {json.dumps(self.device)}'
        return f'{{\n {head},\n "measurements": [\n{rows}\n ]\n}}\n'

    @classmethod
    def shipped(cls) -> Self:
        """Return the table that comes with the package."""
        return cls.from_json(Path(__file__).with_name("calibration_h200.json").read_text())

    def store(self, folder: Path | None = None) -> Path:
        """Keep the table for this machine; written aside and renamed."""
        entry = table_path(self.device, folder)
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=entry.parent, suffix=".part")
        with os.fdopen(handle, "w") as file:
            file.write(self.to_json())
        Path(aside).replace(entry)
        table_for.cache_clear()
        return entry

    def expect(self, facts: PlanFacts, engines: Iterable[str]) -> Expectation | None:
        """Return what is to be expected of some engines; None where nothing like it was measured."""
        wanted = set(engines)
        rows = [row for row in self.measurements if wanted & set(row.ratios)]
        best = min(rows, key=lambda row: row.distance(facts), default=None)
        if best is None or best.distance(facts) > _FAR:
            return None
        alike = sorted((row for row in rows if row.kind == best.kind), key=lambda row: row.nbytes)
        ratios = {
            name: _ratio([row for row in alike if row.ratios.get(name)], name, facts.nbytes)
            for name in sorted({name for row in alike for name in row.ratios} & wanted)
        }
        return Expectation(best.fragment_nbytes, ratios)


def _measurement(row: dict[str, Any]) -> Measurement:
    """Read one row; raises what a row of another kind makes Python raise."""
    found = Measurement(
        str(row["direction"]),
        int(row["fragment_nbytes"]),
        int(row["count"]),
        int(row["window_nbytes"]),
        {str(name): float(ratio) for name, ratio in row["ratios"].items()},
    )
    sizes = found.fragment_nbytes, found.count, found.window_nbytes + 1
    if not all(0 < size < _MOST for size in sizes) or not found.ratios:
        raise ValueError("a measurement of nothing")
    if not all(0 <= ratio < _MOST for ratio in found.ratios.values()):  # false for NaN
        raise ValueError(f"ratios {dict(found.ratios)}")
    return found


@dataclass(frozen=True, slots=True)
class Expectation:
    """What engines are expected to reach, by measurements with fragments of so many bytes."""

    fragment_nbytes: int
    ratios: Mapping[str, float]


def _ratio(rows: Sequence[Measurement], engine: str, nbytes: int) -> float:
    """Return the share of a contiguous copy for so many bytes, from measurements in ascending order.

    Costs are counted in bytes that a contiguous copy would have moved meanwhile. They lie on lines between
    measurements; fewer bytes than were measured cost as much as the fewest, more move as fast as the most.
    """
    if not rows:
        return 0.0
    if nbytes > rows[-1].nbytes:
        return rows[-1].ratios[engine]
    costs = [row.nbytes / row.ratios[engine] for row in rows]
    cost = float(np.interp(nbytes, [row.nbytes for row in rows], costs))
    return nbytes / cost


def table_path(device: str, folder: Path | None = None) -> Path:
    """Return where a device's table is kept."""
    name = re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")
    return (cache_folder() if folder is None else folder) / "calibration" / f"{name}.json"


@cache
def table_for(device: str) -> CalibrationTable:
    """Return what was measured on this machine, or the shipped table."""
    with suppress(OSError, UnicodeDecodeError, InvalidArgumentError):
        return CalibrationTable.from_json(table_path(device).read_text(encoding="utf-8"))
    return CalibrationTable.shipped()


def choose(facts: PlanFacts, usable: Sequence[str], table: CalibrationTable) -> Choice:
    """Choose among the engines that can run a plan.

    Parameters
    ----------
    facts : PlanFacts
    usable : sequence of str
        At least one.
    table : CalibrationTable
    """
    if not usable:
        raise InvalidArgumentError("there is no engine to choose from.")
    order = sorted(usable, key=lambda name: BUSY_ORDER.index(name) if name in BUSY_ORDER else len(BUSY_ORDER))
    if len(order) == 1:
        return Choice(order[0], "the one engine that can run it")
    if facts.on_device and "cuda" in order:
        return Choice("cuda", "page numbers are on the device, where a kernel reads them without waiting")
    found = table.expect(facts, order)
    if found is None:
        return _by_rule(facts, order)
    known = found.ratios
    best = max(known.values())
    taken = next(name for name in order if known.get(name, 0.0) >= best * (1 - _leniency(name, facts)))
    ratios = ", ".join(f"{name} {known[name]:.2f}" for name in sorted(known, key=known.__getitem__)[::-1])
    return Choice(
        taken,
        f"{ratios} of a contiguous copy, as measured on {table.device} with fragments of "
        f"{found.fragment_nbytes} bytes; {taken} {_why(facts)}",
    )


def _leniency(engine: str, facts: PlanFacts) -> float:
    """Return by which share an engine may fall behind the best and still be taken.

    By none where the transfer is brief, or how fast the copy engine is depends on how busy cores are.
    """
    unsteady = engine == "copy_engine" and facts.fragment_nbytes < STEADY_NBYTES
    return 0.0 if facts.brief or unsteady else CLOSE


def _why(facts: PlanFacts) -> str:
    if facts.brief:
        return "is the fastest for a transfer this short"
    return f"costs a busy device least of those within {CLOSE:.0%}"


def _by_rule(facts: PlanFacts, order: Sequence[str]) -> Choice:
    """Choose where nothing like it was measured."""
    rules = (
        ("copy_engine", facts.fragment_nbytes >= 32 << 10, "fragments of 32 KiB and more fill the link"),
        ("staged", facts.window_nbytes >= 64 << 10, "windows of 64 KiB and more fill the link"),
        ("cuda", True, "short fragments go best by a kernel"),
    )
    for name, holds, why in rules:
        if holds and name in order:
            return Choice(name, f"{why} (a rule; nothing like it was measured)")
    return Choice(order[0], "the cheapest for a busy device (nothing like it was measured)")
