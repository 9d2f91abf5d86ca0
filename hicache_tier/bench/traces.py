"""Request traces in Mooncake's format: when prompts came, how long they were, which blocks they shared.

One JSON object a line: `timestamp` (ms from the start), `input_length` and `output_length` (tokens),
`hash_ids` (one for each 512 tokens of input, the last one perhaps cut; equal id = equal block and all before
it).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from .errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

BLOCK_TOKENS = 512
_MAX_LINE = 64 << 20
_MOST = 1 << 53  # what a float holds exactly


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt.

    Attributes
    ----------
    timestamp_ms : int
        Since the start of the trace.
    input_tokens, output_tokens : int
    blocks : tuple[int, ...]
        Ids of its blocks of `BLOCK_TOKENS` tokens, in order.
    """

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


class TraceError(BenchError):
    """A trace is not what the format says; the message names the line."""

    kind = "trace"


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """Read the first `limit` requests of a trace, all where left out.

    Raises
    ------
    TraceError
        Naming the first line that is wrong, and what is wrong with it.
    """
    requests: list[Request] = []
    before: dict[int, int | None] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        read = iter(lambda: file.readline(_MAX_LINE), "")
        lines = ((number, line) for number, line in enumerate(read, 1) if line.strip())
        for number, line in islice(lines, limit):
            try:
                if len(line) == _MAX_LINE:
                    raise ValueError(f"it has {_MAX_LINE} characters or more")  # noqa: TRY301
                request = _parse(line)
                _check(request, requests, before)
            except ValueError as error:
                raise TraceError(f"{path}, line {number}: {error}.") from error
            requests.append(request)
    if not requests:
        raise TraceError(f"{path} holds no request.")
    return requests


def write_trace(path: Path, requests: Sequence[Request]) -> None:
    """Write a trace."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            record = {
                "timestamp": request.timestamp_ms,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.blocks,
            }
            file.write(json.dumps(record) + "\n")


def _parse(line: str) -> Request:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"not an object but {line.strip()[:40]!r}")  # noqa: TRY004 - one kind for all
    blocks = record.get("hash_ids")
    if not isinstance(blocks, list) or not blocks:
        raise ValueError(f"hash_ids must be a list of at least one block, got {str(blocks)[:40]}")
    return Request(
        _count(record, "timestamp"),
        _count(record, "input_length"),
        _count(record, "output_length"),
        tuple(_whole("hash_ids", block) for block in blocks),
    )


def _count(record: dict[str, Any], name: str) -> int:
    value = _whole(name, record.get(name))
    if not 0 <= value <= _MOST:
        raise ValueError(f"{name} must be from 0 to {_MOST}, got {str(value)[:40]}")
    return value


def _whole(name: str, value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} must hold whole numbers, got {str(value)[:40]!r}")
    return value


def _check(request: Request, earlier: Sequence[Request], before: dict[int, int | None]) -> None:
    """Check a request against those before it; `before` is the block before each block so far."""
    needed = -(-request.input_tokens // BLOCK_TOKENS)
    if len(request.blocks) != needed:
        raise ValueError(f"{request.input_tokens} tokens need {needed} hash_ids, got {len(request.blocks)}")
    if earlier and request.timestamp_ms < earlier[-1].timestamp_ms:
        raise ValueError(f"timestamp {request.timestamp_ms} goes back from {earlier[-1].timestamp_ms}")
    if len(set(request.blocks)) < len(request.blocks):
        raise ValueError("a block appears twice, which equal prefixes cannot make")
    parent: int | None = None
    for block in request.blocks:
        if before.setdefault(block, parent) != parent:
            raise ValueError(f"block {block} follows {parent} here and {before[block]} before")
        parent = block
