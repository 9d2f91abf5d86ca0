"""The small files of a partition, checked: its Zarr documents and its state block."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hicache_tier.errors import FormatVersionError, StoreError
from hicache_tier.layout import Layout

from .inside import ARRAY_FILE, read_inside
from .metadata import MAX_METADATA_NBYTES, pages_document, slots_document, state_document
from .state import StateBlock

if TYPE_CHECKING:
    from pathlib import Path

    from .partition_facts import PartitionFacts
    from .partition_files import PartitionPaths


def read_state(paths: PartitionPaths, facts: PartitionFacts) -> tuple[StateBlock | None, str]:
    """Return the state block and what is wrong with it: damaged, missing, or of other slabs than `facts`.

    Raises
    ------
    FormatVersionError
        For a later version.
    """
    try:
        state = StateBlock.read(paths.state)
    except FormatVersionError:
        raise
    except FileNotFoundError:
        return None, "state/c.0 is missing; every page will be verified"
    except StoreError as error:
        return None, f"{error} Every page will be verified."
    except OSError as error:
        return None, f"state/c.0 cannot be read: {error.strerror}; every page will be verified"
    shape = facts.shape
    told = (state.page_nbytes, state.stride, state.slots_per_slab)
    if told != (shape.page_nbytes, shape.stride, shape.slots):
        return state, f"state/c.0 is of other slabs: page_nbytes, stride, slots a slab are {told}"
    return state, ""


def document_problems(paths: PartitionPaths, facts: PartitionFacts, axis_order: object) -> list[str]:
    """Say which `zarr.json` of the partition's arrays does not describe its files."""
    layout = next(iter(Layout.with_page_axes(axis_order)), None)
    if layout is None:
        return [f"zarr.json: axis order {axis_order!r} is not known"]
    found: dict[str, dict[str, Any] | None] = {}
    problems: list[str] = []
    for folder in (paths.pages, paths.slots, paths.state.parent):
        found[folder.name] = _read(folder, problems)
    capacity = _capacity(found["pages"]) or _capacity(found["slots"])
    wanted = {
        "pages": pages_document(
            facts.geometry, layout, capacity, facts.shape.slots, encrypted=facts.encrypted
        ),
        "slots": slots_document(capacity, facts.shape.slots),
        "state": state_document(),
    }
    for name, document in wanted.items():
        told = found[name]
        if told is None:
            continue
        wrong = sorted(field for field, value in document.items() if told.get(field) != value)
        if wrong:
            problems.append(f"{name}/zarr.json does not describe the files: {', '.join(wrong)}")
    return problems


def _read(folder: Path, problems: list[str]) -> dict[str, Any] | None:
    name = f"{folder.name}/zarr.json"
    try:
        document = json.loads(read_inside(folder / "zarr.json", ARRAY_FILE, MAX_METADATA_NBYTES))
    except FileNotFoundError:
        problems.append(f"{name} is missing")
    except OSError as error:
        problems.append(f"{name} cannot be read: {error.strerror}")
    except (ValueError, RecursionError):
        problems.append(f"{name} is not JSON")
    else:
        if isinstance(document, dict):
            return document
        problems.append(f"{name} is not an object")
    return None


def _capacity(document: dict[str, Any] | None) -> int:
    try:
        capacity = document["shape"][0] if document else 0
    except (KeyError, TypeError, IndexError):
        return 0
    return capacity if type(capacity) is int else 0
