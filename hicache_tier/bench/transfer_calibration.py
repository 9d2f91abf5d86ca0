"""Measuring engines over small pools, for the table that `auto` chooses by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from hicache_tier.geometry import KVGeometry
from hicache_tier_kernels import CalibrationTable, CopyPlan, Measurement, PlanFacts, engines

from .errors import BenchError
from .transfer_clock import CudaClock, Link
from .transfer_rig import Move, Rig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache_tier_kernels import Engine, Prepared, RowMap

ROWS = (256, 576, 2048)
PAGES = (1, 16, 64)
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
_LAYERS = 16
_SHORT_TOKENS, _LONG_NBYTES = 256, 128 << 20
_REPEATS = 3
_BUFFER_NBYTES = 256 << 20
_HOPELESS = 8.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Pools to measure in: one component of sixteen layers, rows of so many bytes."""

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
        most = _LONG_NBYTES // rig.geometry.page_nbytes
        for pages in dict.fromkeys((most, max(1, _SHORT_TOKENS // rig.geometry.page_tokens))):
            for op in ("backup", "load"):
                sets = [[move] for (move,) in rig.page_sets(pages, (op,), "random")]
                yield from self._compare(rig, sets, rig.geometry.num_layers, check=pages == most)
                if op == "load":
                    yield from self._compare(rig, sets, 1, check=pages == most)

    def _compare(
        self, rig: Rig, sets: list[list[Move]], layers: int, *, check: bool
    ) -> Iterator[tuple[PlanFacts, dict[str, float]]]:
        """Measure the engines over plans of `layers` layers each, which together move all of them."""
        everything = range(rig.geometry.num_layers)
        parts = [everything[at : at + layers] for at in range(0, len(everything), layers)]
        maps = [(rig.device.row_map().select(part), rig.host.row_map().select(part)) for part in parts]
        plans = [[_plan(move, *sides) for sides in maps] for (move,) in sets]
        (move,) = sets[0]
        nbytes = len(move.host_pages) * rig.geometry.page_nbytes
        link = "d2h" if move.op == "backup" else "h2d"
        ceiling = median(self._link.laps(link, nbytes, _REPEATS))
        ratios = {}
        for name in self.engines:
            engine = engines()[name]
            if not all(engine.supports(plan) for plan in plans[0]):
                continue
            submit = partial(_submit, engine, plans, [])
            if check and not rig.check(sets[0], partial(self._arrive, submit)):
                raise BenchError(f"engine {name} moved wrong bytes in {rig.host!r}; nothing is kept.")
            ratios[name] = round(ceiling / self._seconds(submit, ceiling), 4)
        if ratios:
            yield PlanFacts.of(plans[0][0]), ratios

    def _seconds(self, submit: Callable[[int], None], ceiling: float) -> float:
        """Return the median of a few laps, or the first where it is no match for a contiguous copy."""
        laps = [self._clock.lap(partial(submit, 0)).device]
        if laps[0] < _HOPELESS * ceiling:
            laps = [self._clock.lap(partial(submit, turn)).device for turn in range(_REPEATS)]
        return median(laps)

    def _arrive(self, submit: Callable[[int], None]) -> None:
        self._clock.lap(partial(submit, 0))


def _plan(move: Move, device: RowMap, host: RowMap) -> CopyPlan:
    if move.op == "backup":
        return CopyPlan(device, host, move.device_pages, move.host_pages)
    return CopyPlan(host, device, move.host_pages, move.device_pages)


def _submit(engine: Engine, plans: list[list[CopyPlan]], kept: list[Prepared], turn: int) -> None:
    """Prepare and submit one set, plan by plan, each a layer at a time where that is possible for a load.

    `kept` holds what the device still reads when this returns; it is emptied by the next call.
    """
    kept.clear()
    stream = torch.cuda.current_stream()
    for plan in plans[turn % len(plans)]:
        prepared = engine.prepare(plan, stream)
        kept.append(prepared)
        planes = range(len(plan.source.planes))
        if prepared.by_layer and plan.destination.device.type == "cuda":
            for plane in planes:
                prepared.submit((plane,), stream)
        else:
            prepared.submit(planes, stream)
