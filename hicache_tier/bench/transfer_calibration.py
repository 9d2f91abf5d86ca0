"""Measuring engines over small pools, for the table that `auto` chooses by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from hicache_tier.errors import InvalidArgumentError, UnsupportedTransferError
from hicache_tier.geometry import KVGeometry
from hicache_tier_kernels import CalibrationTable, CopyPlan, Measurement, PlanFacts, engines

from .errors import BenchError
from .transfer_cases import Direction
from .transfer_clock import CudaClock, Link
from .transfer_engine import Runs
from .transfer_rig import Rig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .transfer_rig import Move

ROWS = (256, 576, 2048)
PAGES = (1, 16, 64)
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
_LAYERS = 64
_SHORT_TOKENS = 256
_LONGER_NBYTES = (64 << 20, 384 << 20)
"""What a few thousand tokens have, and 8K tokens of most models; what an engine costs once shows in neither
as it does in 256 tokens."""
_REPEATS = 5
_BUFFER_NBYTES = 384 << 20
_HOPELESS = 0.05
"""Ratio of a short transfer below which a long one is not worth its time, where another engine did better."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Pools to measure in: one component of as many layers as models have, rows of so many bytes."""

    row_nbytes: int
    page_tokens: int
    layout: str

    @property
    def geometry(self) -> KVGeometry:
        """Latent rows of single bytes."""
        return KVGeometry.mla(
            num_layers=_LAYERS, latent_dim=self.row_nbytes, dtype="uint8", page_tokens=self.page_tokens
        )


def samples() -> list[Sample]:
    """Return all pools; those that differ in nothing that engines see are left out."""
    return [
        Sample(row, page, layout)
        for row in ROWS
        for page in PAGES
        for layout in LAYOUTS
        if (page, layout) != (1, "page_first_direct")  # page_first by another name
    ]


class Calibration:
    """Measures every engine that runs a plan, as a share of a contiguous copy.

    Parameters
    ----------
    device : torch.device

    Attributes
    ----------
    engines : tuple[str, ...]
        Those that run here.
    unavailable : dict[str, str]
        The others, with the reason.
    rows : list of dict
        What was measured.

    Raises
    ------
    BenchError
        Where the device is no CUDA device, or no engine can run on it.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise BenchError(f"--calibrate needs a CUDA device, got {device}.")
        self._device = device
        self._clock = CudaClock(device)
        self._link = Link(self._clock, _BUFFER_NBYTES)
        found = {name: engine.available(device) for name, engine in engines().items()}
        self.engines = tuple(name for name, support in found.items() if support)
        self.unavailable = {name: support.reason for name, support in found.items() if not support}
        if not self.engines:
            why_not = "; ".join(f"{name}: {reason}" for name, reason in self.unavailable.items())
            raise BenchError(f"--calibrate finds no engine that runs here ({why_not}).")
        self.rows: list[dict[str, Any]] = []

    def run(self, tick: Callable[[], None]) -> CalibrationTable:
        """Measure all samples; `tick` is called after each."""
        measured: dict[PlanFacts, dict[str, float]] = {}
        for sample in samples():
            with Rig(sample.geometry, sample.layout, 0, self._device, _BUFFER_NBYTES) as rig:
                for facts, ratios in self._sample(rig):
                    measured[facts] = ratios
                    self.rows.append(
                        {
                            "direction": facts.direction,
                            "layout": sample.layout,
                            "page_tokens": sample.page_tokens,
                            "fragment_nbytes": facts.fragment_nbytes,
                            "count": facts.count,
                            "window_nbytes": facts.window_nbytes,
                            "ratios": ratios,
                        }
                    )
            tick()
        measurements = tuple(
            Measurement(facts.direction, facts.fragment_nbytes, facts.count, facts.window_nbytes, ratios)
            for facts, ratios in measured.items()
        )
        return CalibrationTable(torch.cuda.get_device_name(self._device), measurements)

    def _sample(self, rig: Rig) -> Iterator[tuple[PlanFacts, dict[str, float]]]:
        longer = [nbytes // rig.geometry.page_nbytes for nbytes in _LONGER_NBYTES]
        counts = dict.fromkeys((max(1, _SHORT_TOKENS // rig.geometry.page_tokens), *longer))
        for direction in (Direction.BACKUP, Direction.LOAD, Direction.LOAD_LAYER):
            ratios: dict[str, float] = {}
            for pages in counts:
                sets = rig.page_sets(pages, direction.moves, "random")
                ratios = self._compare(rig, sets, direction, ratios)
                if ratios:
                    yield _facts(rig, sets[0][0], direction), ratios

    def _compare(
        self, rig: Rig, sets: list[list[Move]], direction: Direction, known: dict[str, float]
    ) -> dict[str, float]:
        """Measure all engines that may run these transfers; those known to be hopeless are believed."""
        nbytes = len(sets[0][0].host_pages) * rig.geometry.page_nbytes
        ceiling = median(self._link.laps(direction.links[0], nbytes, _REPEATS))
        ratios = {}
        for name in self.engines:
            if known and known.get(name, 1.0) < min(_HOPELESS, max(known.values()) / 4):
                ratios[name] = known[name]
                continue
            runs = Runs(rig, sets, direction, engine=name)
            try:
                right = rig.check(sets[0], partial(self._arrive, runs))
            except (InvalidArgumentError, UnsupportedTransferError):
                continue  # not for these pages
            if not right:
                raise BenchError(f"engine {name} moved wrong bytes in {rig.host!r}; nothing is kept.")
            laps = [self._clock.lap(partial(runs.submit, turn)).device for turn in range(_REPEATS + 1)][1:]
            ratios[name] = round(ceiling / median(laps), 4)
        return ratios

    def _arrive(self, runs: Runs) -> None:
        self._clock.lap(partial(runs.submit, 0))
        self._clock.settle()


def _facts(rig: Rig, move: Move, direction: Direction) -> PlanFacts:
    """Return what the choice sees of such a transfer."""
    layers = range(1 if direction is Direction.LOAD_LAYER else rig.geometry.num_layers)
    device, host = rig.device.row_map().select(layers), rig.host.row_map().select(layers)
    if move.op == "backup":
        return PlanFacts.of(CopyPlan(device, host, move.device_pages, move.host_pages))
    return PlanFacts.of(CopyPlan(host, device, move.host_pages, move.device_pages))
