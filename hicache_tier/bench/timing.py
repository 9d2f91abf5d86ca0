"""Timing that compares like with like: contestants take turns, medians are quoted."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True)
class Samples:
    """Wall and CPU seconds of repeated runs of one contestant (CPU of the whole process, kernel included)."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median wall time of a run, s."""
        return median(self.wall)

    @property
    def cpu_seconds(self) -> float:
        """Median CPU time of a run, s."""
        return median(self.cpu)


@dataclass(frozen=True, slots=True)
class Contestant:
    """Work to time. `prepare` runs before each turn, outside the clock.

    `run` may return its seconds where it measures them itself, without what starting it costs.
    """

    name: str
    run: Callable[[], float | None]
    prepare: Callable[[], None] | None = None


def take_turns(
    contestants: list[Contestant], repeats: int, tick: Callable[[], None] | None = None
) -> dict[str, Samples]:
    """Run every contestant once to warm up, then in turn `repeats` times."""
    samples = {contestant.name: Samples() for contestant in contestants}
    for turn in range(repeats + 1):
        for contestant in contestants:
            if contestant.prepare:
                contestant.prepare()
            cpu, wall = time.process_time(), time.perf_counter()
            own = contestant.run()
            wall = time.perf_counter() - wall if own is None else own
            cpu = time.process_time() - cpu
            if turn:
                samples[contestant.name].wall.append(wall)
                samples[contestant.name].cpu.append(cpu)
            if tick:
                tick()
    return samples


def ratio(ours: list[float], other: list[float]) -> float:
    """Median over the turns of other / ours: how many times as fast ours was."""
    return median(b / a for a, b in zip(ours, other, strict=True))
