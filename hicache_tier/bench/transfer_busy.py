"""Transfers beside matrix products: what each costs the other."""

from __future__ import annotations

from functools import cached_property
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Any

from .gemm import Gemm, beside
from .transfer_engine import Runs
from .transfer_rig import Rig
from .transfer_runs import REFUSALS, facts

if TYPE_CHECKING:
    from collections.abc import Callable

    from .transfer_cases import TransferCase
    from .transfer_clock import CudaClock, Link

_WINDOW_SECONDS = 0.25
_ROUNDS = 5


class BusyBench:
    """Measures cases beside bf16 products of 8192^3 on another stream.

    Products alone, beside a bare contiguous copy, and beside the transfer take turns, so that a change of the
    GPU's clock meets all three.

    Parameters
    ----------
    clock : CudaClock
    link : Link
    engine : str, optional
        The one to run all cases.
    buffer_nbytes : int
    tick : callable
        Called once a case.
    """

    def __init__(
        self,
        clock: CudaClock,
        link: Link,
        engine: str | None,
        buffer_nbytes: int,
        tick: Callable[[], None],
    ) -> None:
        self._clock, self._link, self._engine = clock, link, engine
        self._buffer_nbytes, self._tick = buffer_nbytes, tick
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[dict[str, Any]] = []

    def run(self, cases: list[TransferCase]) -> None:
        """Measure cases that share their pools."""
        try:
            with Rig.for_cases(cases, self._clock.device, self._buffer_nbytes) as rig:
                for case in cases:
                    self._run_case(rig, case)
        except REFUSALS as error:
            self.skipped += [{**facts(case), "reason": str(error)} for case in cases]

    @cached_property
    def _gemm(self) -> Gemm:
        return Gemm(self._clock.device)

    @cached_property
    def _count(self) -> int:
        return self._gemm.products_in(_WINDOW_SECONDS)

    def _run_case(self, rig: Rig, case: TransferCase) -> None:
        try:
            sets = rig.moves(case)
            runs = Runs(rig, sets, case.direction, case.io_backend, self._engine)
            verified = rig.check(sets[0], lambda: self._arrive(runs))
            row = {**facts(case), "engine": runs.engine, "verified": verified}
            if verified:
                row |= self._measure(case, runs, case.pages * rig.geometry.page_nbytes)
            self.rows.append(row)
        except REFUSALS as error:
            self.skipped.append({**facts(case), "reason": str(error)})
        self._tick()

    def _arrive(self, runs: Runs) -> None:
        self._clock.lap(lambda: runs.submit(0))
        self._clock.settle()

    def _measure(self, case: TransferCase, runs: Runs, nbytes: int) -> dict[str, Any]:
        (link,) = case.direction.links
        turns = count()
        work: dict[str, Callable[[], None]] = {
            "bare": lambda: self._link.copy(link, nbytes),
            "transfer": lambda: runs.submit(next(turns)),
        }
        products: dict[str, list[float]] = {name: [] for name in ("alone", *work)}
        laps: dict[str, list[float]] = {name: [] for name in work}
        idle: list[float] = []
        for _ in range(_ROUNDS):
            idle += self._link.laps(link, nbytes, 2)
            self._gemm.start(self._count)
            products["alone"].append(self._gemm.seconds())
            for name, submit in work.items():
                self._clock.settle()
                seconds, found = beside(self._gemm, self._count, submit, self._clock.stream)
                products[name].append(seconds)
                laps[name] += found
        return _figures(nbytes, median(idle), products, laps)


def _figures(
    nbytes: int, idle: float, products: dict[str, list[float]], laps: dict[str, list[float]]
) -> dict[str, Any]:
    """Return the figures of a row; those of the transfer are None where not one ended beside the products."""
    alone, bare, ours = (median(products[name]) for name in ("alone", "bare", "transfer"))
    rate = {name: nbytes / median(found) / 1e9 if found else None for name, found in laps.items()}
    ceiling = nbytes / idle / 1e9
    return {
        "gb_s": rate["transfer"],
        "bare_gb_s": rate["bare"],
        "c_gb_s": ceiling,
        "ratio_to_c": rate["transfer"] / ceiling if rate["transfer"] else None,
        "bare_ratio_to_c": rate["bare"] / ceiling if rate["bare"] else None,
        "transfers": len(laps["transfer"]),
        "gemm_ms_alone": alone * 1e3,
        "gemm_ms_bare": bare * 1e3,
        "gemm_ms": ours * 1e3,
        "gemm_slowdown": ours / alone - 1,
        "gemm_slowdown_bare": bare / alone - 1,
        "gemm_slowdown_over_bare": ours / bare - 1,
    }
