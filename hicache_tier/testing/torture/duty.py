"""What a process is told when it is started."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Duty:
    """One post: who works there, where, and how.

    Attributes
    ----------
    role : str
        One of `roles.ROLES`.
    root : str
    arena : str
        Name of the root in what is told.
    board : str
        Path of its `Board`; a `Ledger` for each partition lies beside it.
    log : str
        Where findings are appended, a JSON object a line.
    seed : int
    capacity_bytes : int
    verify, deadline_s
        As of `open_store`.
    bad_engine : bool
        Whether bytes are moved by an engine that delays, fails, tears and lies; `verify="always"` then.
    strict : bool
        Whether nothing but this process removes its pages: what it stored it must hold.
    clock_jumps : bool
    """

    role: str
    root: str
    arena: str
    board: str
    log: str
    seed: int
    capacity_bytes: int
    verify: str = "suspect"
    deadline_s: float | None = 30.0
    bad_engine: bool = False
    strict: bool = False
    clock_jumps: bool = False

    def dumps(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Duty:
        """Read what `dumps` wrote."""
        return cls(**json.loads(text))
