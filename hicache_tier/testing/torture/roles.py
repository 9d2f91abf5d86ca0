"""What a process may be, and the process."""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from typing import TYPE_CHECKING

from .board import Field
from .duty import Duty

if TYPE_CHECKING:
    from .worker import Worker

ROLES = {
    "reader": "reader:Reader",
    "writer": "writer:Writer",
    "exporter": "exporter:Exporter",
    "stranger": "stranger:Stranger",
    "tier": "tiered:Tiered",
}


def prepare() -> None:
    """Import what roles need, so that a fork has it."""
    for role in ROLES:
        _load(role)


def _load(role: str) -> type[Worker]:
    module, name = ROLES[role].split(":")
    found: type[Worker] = getattr(import_module(f"{__package__}.{module}"), name)
    return found


def at_work(duty: Duty) -> None:
    """Do a duty until told to stop; what is raised is a finding."""
    worker = _load(duty.role)(duty)
    try:
        worker.run()
    except BaseException:
        worker.find("raised", error=traceback.format_exc())
        worker.board.add(Field.ERRORS, 1)
        raise


if __name__ == "__main__":
    at_work(Duty.loads(sys.argv[1]))
