"""How the benchmark submits transfers: the calls that an engine makes, and what each costs its thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_tier.errors import EngineUnavailableError
from hicache_tier.transfer import backup, load, transfer_path

from .transfer_cases import Direction

if TYPE_CHECKING:
    from hicache_tier.transfer import Completion

    from .transfer_cases import TransferCase
    from .transfer_rig import Move, Rig


class Runs:
    """Transfers of one case, over sets of pages in turn.

    Attributes
    ----------
    engine, reason : str
        Who carries them out, and why.
    calls : list of float
        Seconds that each call took its caller.
    calls_a_turn, layers_a_call : int
    """

    def __init__(self, rig: Rig, case: TransferCase, sets: list[list[Move]], engine: str | None) -> None:
        self._rig, self._case, self._sets = rig, case, sets
        paths = [transfer_path(rig.device, rig.host, case.io_backend, op) for op in case.direction.moves]
        names = dict.fromkeys(path.engine for path in paths)
        if engine is not None and set(names) != {engine}:
            raise EngineUnavailableError(
                f"engine {engine!r} does not run this case; {', '.join(names)} does."
            )
        self.engine = "+".join(names)
        self.reason = paths[0].reason
        self.calls: list[float] = []
        layers = rig.geometry.num_layers
        single = case.direction is Direction.LOAD_LAYER
        self.layers_a_call = 1 if single else layers
        self.calls_a_turn = layers if single else len(paths)

    def submit(self, turn: int) -> None:
        """Submit one set of moves; the current stream waits for their end (on a CPU they have ended)."""
        pending: list[Completion] = []
        for move in self._sets[turn % len(self._sets)]:
            if self._case.direction is Direction.LOAD_LAYER:
                pending += [self._call(move, layer) for layer in self._rig.device.owned_layers]
            else:
                pending.append(self._call(move, None))
        for completion in pending:
            self._join(completion)

    def _call(self, move: Move, layer: int | None) -> Completion:
        device, host, backend = self._rig.device, self._rig.host, self._case.io_backend
        begun = time.perf_counter()
        if move.op == "backup":
            completion = backup(device, host, move.device_pages, move.host_pages, backend)
        else:
            completion = load(host, device, move.host_pages, move.device_pages, backend, layer)
        self.calls.append(time.perf_counter() - begun)
        return completion

    def _join(self, completion: Completion) -> None:
        completion.wait()


class Transfers:
    """Makes `Runs`, with one engine where one is insisted on."""

    def __init__(self, engine: str | None = None) -> None:
        self._engine = engine

    def prepare(self, rig: Rig, case: TransferCase, sets: list[list[Move]]) -> Runs:
        """Return the runs of a case.

        Raises
        ------
        UnsupportedTransferError
            Where the path table refuses the case.
        EngineUnavailableError
            Where the engine that was insisted on does not run it.
        """
        return Runs(rig, case, sets, self._engine)
