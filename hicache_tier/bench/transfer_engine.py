"""How the benchmark submits transfers: the calls that an engine makes, and what each costs its thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_tier.transfer import TransferOptions, backup, load

from .transfer_cases import Direction

if TYPE_CHECKING:
    from hicache_tier.transfer import Completion

    from .transfer_rig import Move, Rig


class Runs:
    """Transfers over sets of pages in turn.

    Parameters
    ----------
    rig : Rig
    sets : list of list of Move
    direction : Direction
        Decides which calls are made.
    io_backend : str
    engine : str, optional
        The one to run them.

    Attributes
    ----------
    paths : dict of str to str
        Engines that have carried out transfers, and why they were chosen.
    calls : list of float
        Seconds that each call took its caller.
    calls_a_turn, layers_a_call : int
    """

    def __init__(
        self,
        rig: Rig,
        sets: list[list[Move]],
        direction: Direction,
        io_backend: str = "auto",
        engine: str | None = None,
    ) -> None:
        self._rig, self._sets, self._direction, self._io_backend = rig, sets, direction, io_backend
        self._options = TransferOptions(engine=engine)
        self.paths: dict[str, str] = {}
        self.calls: list[float] = []
        self._started: list[Completion] = []
        layers = rig.geometry.num_layers
        single = direction is Direction.LOAD_LAYER
        self.layers_a_call = 1 if single else layers
        self.calls_a_turn = layers if single else len(direction.moves)

    @property
    def engine(self) -> str:
        """Names of the engines that have carried out transfers."""
        return "+".join(self.paths)

    def submit(self, turn: int) -> None:
        """Submit one set of moves; the current stream waits for their end (on a CPU they have ended)."""
        for completion in self._start(turn):
            completion.wait_on()

    def submit_first(self, turn: int) -> None:
        """Submit one set of moves; the current stream waits for the first layer of each.

        `finish` waits for the others: a transfer that is still submitted holds up the next.
        """
        self._started = self._start(turn)
        for completion in self._started:
            completion.wait_layer_on(completion.layers[0])

    def finish(self) -> None:
        """Wait for what `submit_first` has begun."""
        for completion in self._started:
            completion.wait()
        self._started = []

    def _start(self, turn: int) -> list[Completion]:
        started: list[Completion] = []
        for move in self._sets[turn % len(self._sets)]:
            if self._direction is Direction.LOAD_LAYER:
                started += [self._call(move, layer) for layer in self._rig.device.owned_layers]
            else:
                started.append(self._call(move, None))
        self.paths |= {one.path.engine: one.path.reason for one in started[:1] + started[-1:]}
        return started

    def _call(self, move: Move, layer: int | None) -> Completion:
        rig, backend, options = self._rig, self._io_backend, self._options
        near, far = move.device_pages, move.host_pages
        begun = time.perf_counter()
        if move.op == "backup":
            completion = backup(rig.device, rig.host, near, far, backend, options=options)
        else:
            completion = load(rig.host, rig.device, far, near, backend, layer, options=options)
        self.calls.append(time.perf_counter() - begun)
        return completion
