"""Which path some pages take: what the table and the machine allow, then what measured best."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hicache_tier_kernels import CopyPlan, PlanFacts, choose, engine_named, table_for

from .errors import InvalidArgumentError, UnsupportedTransferError
from .paths import engine_paths

if TYPE_CHECKING:
    from .pairing import Pair
    from .paths import Capabilities, Path


def choose_path(  # noqa: PLR0917 - internal
    pair: Pair,
    plan: CopyPlan,
    path: Path,
    io_backend: str,
    able: Capabilities,
    engine: str | None,
) -> Path:
    """Return the path with the engine for these pages; the choice is kept for others like them.

    Parameters
    ----------
    pair : Pair
        Of the layers that go together.
    plan : CopyPlan
        Between the same pools; only its page numbers count.
    path : Path
        What `select_path` decided for `io_backend` and `able`.
    io_backend : str
        As asked for.
    able : Capabilities
    engine : str, optional
        The one engine to take.

    Raises
    ------
    InvalidArgumentError
        Where `engine` cannot run the plan.
    UnsupportedTransferError
        Where none can.
    """
    facts = PlanFacts.of(plan, (pair.source, pair.destination))
    kind = (
        io_backend,
        engine,
        facts.on_device,
        facts.brief,
        facts.fragment_nbytes.bit_length(),
        facts.count.bit_length(),
    )
    found = pair.paths.get(kind)
    if found is None:
        allowed = engine_paths(path, io_backend, able)
        numbers = plan.source_pages, plan.destination_pages
        plan = CopyPlan(pair.source, pair.destination, *numbers, check_indices=False)
        found = pair.paths.setdefault(kind, _pick(allowed, plan, facts, path, engine))
    return found


def _pick(allowed: dict[str, Path], plan: CopyPlan, facts: PlanFacts, path: Path, engine: str | None) -> Path:
    support = {name: engine_named(name).supports(plan) for name in allowed}
    usable = [name for name, found in support.items() if found]
    refused = "; ".join(f"{name}: {found.reason}" for name, found in support.items() if not found)
    if engine is not None:
        if engine not in usable:
            raise InvalidArgumentError(
                f"engine {engine!r} cannot run this transfer. Allowed: {', '.join(usable)}. {refused}"
            )
        return replace(allowed[engine], reason="asked for")
    if not usable:
        raise UnsupportedTransferError(
            f"no engine can {path.op} these pages ({refused})",
            layout=path.layout.value,
            io_backend=path.io_backend,
            sharded=path.sharded,
        )
    device = plan.source.device if path.op == "backup" else plan.destination.device
    choice = choose(facts, usable, table_for(torch.cuda.get_device_name(device)))
    return replace(allowed[choice.engine], reason=f"{choice.engine} chosen: {choice.reason}")
