"""Runs of the cases: each is checked, then timed against contiguous copies of as many bytes."""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from hicache_tier.errors import (
    EngineUnavailableError,
    InvalidArgumentError,
    MemoryBudgetError,
    UnsupportedTransferError,
)

from .transfer_cases import Direction
from .transfer_engine import Runs
from .transfer_rig import Rig

if TYPE_CHECKING:
    from collections.abc import Callable

    from .transfer_cases import TransferCase
    from .transfer_clock import Clock, Lap, Link
    from .transfer_peers import Peer
    from .transfer_rig import Move

REFUSALS = (UnsupportedTransferError, EngineUnavailableError, MemoryBudgetError, InvalidArgumentError)
_FIRST_LAPS = 3


class TransferBench:
    """Measures groups of cases; rows, what peers did, and what was skipped add up in it.

    Parameters
    ----------
    clock : Clock
    link : Link
    engine : str, optional
        The one to run all cases.
    peers : list of Peer
    repeats : int
        Timed runs of each case; contiguous copies take half as many before and half after.
    buffer_nbytes : int
        Least size of the pools.
    tick : callable
        Called once a case.
    """

    def __init__(  # noqa: PLR0917 - internal, one object for each noun
        self,
        clock: Clock,
        link: Link,
        engine: str | None,
        peers: list[Peer],
        repeats: int,
        buffer_nbytes: int,
        tick: Callable[[], None],
    ) -> None:
        self._clock, self._link, self._engine, self._peers = clock, link, engine, peers
        self._repeats, self._buffer_nbytes, self._tick = repeats, buffer_nbytes, tick
        self.rows: list[dict[str, Any]] = []
        self.peer_rows: list[dict[str, Any]] = []
        self.skipped: list[dict[str, Any]] = []

    def run(self, cases: list[TransferCase]) -> None:
        """Measure cases that share their pools."""
        try:
            rig = Rig.for_cases(cases, self._clock.device, self._buffer_nbytes)
        except REFUSALS as error:
            for case in cases:
                self._skip(case, error)
            return
        with rig:
            for case in cases:
                try:
                    self._measure(rig, case)
                except REFUSALS as error:
                    self._skip(case, error)
                else:
                    self._tick()

    def _skip(self, case: TransferCase, error: Exception) -> None:
        self.skipped.append({**facts(case), "reason": str(error)})
        self._tick()

    def _measure(self, rig: Rig, case: TransferCase) -> None:
        sets = rig.moves(case)
        runs = Runs(rig, sets, case.direction, case.io_backend, self._engine)
        row = {**facts(case), "engine": None, "fragment_nbytes": rig.fragment_nbytes()}
        row["verified"] = rig.check(sets[0], lambda: self._arrive(runs.submit, 0))
        row |= {"engine": runs.engine, "reason": "; ".join(runs.paths.values())}
        nbytes = case.pages * rig.geometry.page_nbytes
        before = self._ceilings(case, nbytes)
        laps = self._laps(runs.submit, self._repeats) if row["verified"] else []
        row |= _calls(runs, len(laps))
        if laps and case.direction is Direction.LOAD:
            first = self._laps(runs.submit_first, _FIRST_LAPS, runs.finish)
            row["first_layer_us"] = median(lap.device for lap in first) * 1e6
        ceilings = [a + b for a, b in zip(before, self._ceilings(case, nbytes), strict=True)]
        best = sum(nbytes / median(ceiling) for ceiling in ceilings)
        row |= speeds(laps, nbytes * len(ceilings), best)
        self.rows.append(row)
        for peer in self._peers:
            self._against(peer, rig, case, sets, row, best)

    def _against(  # noqa: PLR0917 - internal
        self,
        peer: Peer,
        rig: Rig,
        case: TransferCase,
        sets: list[list[Move]],
        row: dict[str, Any],
        best: float,
    ) -> None:
        """Time a peer over the same pages."""
        mine: dict[str, Any] = {**facts(case), "peer": peer.name}
        moves, share = peer.trim(rig, sets)
        support = peer.supports(rig, case)
        if not support:
            self.peer_rows.append({**mine, "verified": None, "reason": support.reason} | speeds([], 0, best))
            return
        laps: list[Lap] = []
        try:
            submit = peer.prepare(rig, case, moves)
            mine["verified"] = rig.check(moves[0], lambda: self._arrive(submit, 0))
            if mine["verified"]:
                laps = self._laps(submit, peer.repeats)
        except Exception as error:  # noqa: BLE001 - whatever ails a peer is its row, not the end of ours
            mine |= {"verified": None, "reason": f"{type(error).__name__}: {error}"}
        nbytes = round(case.pages * rig.geometry.page_nbytes * len(case.direction.moves) * share)
        mine |= speeds(laps, nbytes, best)
        ours, theirs = row["gb_s"], mine["gb_s"]
        mine["ours_over_peer"] = ours / theirs if ours and theirs else None
        self.peer_rows.append(mine)

    def _laps(
        self, submit: Callable[[int], None], repeats: int, finish: Callable[[], None] = lambda: None
    ) -> list[Lap]:
        """Time `repeats` turns after two that do not count; `finish` follows each and is not timed."""
        laps = []
        for turn in range(repeats + 2):
            laps.append(self._clock.lap(partial(submit, turn)))
            finish()
        return laps[2:]

    def _arrive(self, submit: Callable[[int], None], turn: int) -> None:
        self._clock.lap(lambda: submit(turn))
        self._clock.settle()

    def _ceilings(self, case: TransferCase, nbytes: int) -> list[list[float]]:
        """Return seconds of contiguous copies, for each direction of the case."""
        return [self._link.laps(link, nbytes, -(-self._repeats // 2)) for link in case.direction.links]


def _calls(runs: Runs, laps: int) -> dict[str, float | None]:
    """Return what a call of the last laps took its caller, by layer."""
    if not laps:
        return {"submit_us": None}
    calls = runs.calls[-laps * runs.calls_a_turn :]
    return {"submit_us": median(calls) / runs.layers_a_call * 1e6}


def facts(case: TransferCase) -> dict[str, Any]:
    """Return what names a case in a row."""
    return {
        "geometry": case.geometry,
        "page_tokens": case.page_tokens,
        "layout": case.layout,
        "io_backend": case.io_backend,
        "direction": case.direction.value,
        "tokens": case.tokens,
        "order": case.order,
    }


def speeds(laps: list[Lap], nbytes: int, best: float) -> dict[str, float | None]:
    """Return the figures of some runs.

    Parameters
    ----------
    laps : list of Lap
    nbytes : int
        Bytes of one run, in all directions together.
    best : float
        Bytes a second of contiguous copies, the sum over the directions.
    """
    if not laps:
        return {"gb_s": None, "wall_gb_s": None, "c_gb_s": best / 1e9, "ratio_to_c": None}
    rate = nbytes / median(lap.device for lap in laps)
    return {
        "gb_s": rate / 1e9,
        "wall_gb_s": nbytes / median(lap.wall for lap in laps) / 1e9,
        "c_gb_s": best / 1e9,
        "ratio_to_c": rate / best,
    }
