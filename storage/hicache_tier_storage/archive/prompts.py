"""Prompts as files of token ids, and the keys of their pages."""

from __future__ import annotations

import json
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.keys import chain_keys, key_root, token_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

_MAX_FILE_NBYTES = 1 << 30
_MAX_LINE_NBYTES = 64 << 20
_MAX_HEADER_NBYTES = 1 << 16


def read_prompts(path: str | Path) -> list[NDArray[np.uint32]]:
    """Read token ids: a `.npy` array of integers, or text with one prompt a line.

    A line is a JSON array of numbers, a JSON object with such an array under `tokens`, `token_ids` or
    `input_ids`, or numbers with spaces or commas between them.

    Raises
    ------
    InvalidArgumentError
        Where it is none of these; names the line.
    """
    path = Path(path)
    try:
        _check_size(path)
        if path.suffix == ".npy":
            array = _load(path)
            return [_tokens(row, str(path)) for row in (array if array.ndim == 2 else [array])]
        return [
            _tokens(_parse(line, f"{path}, line {at}"), f"{path}, line {at}")
            for at, line in enumerate(lines_of(path, _MAX_LINE_NBYTES), 1)
            if line.strip()
        ]
    except InvalidArgumentError:
        raise
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} cannot be read as token ids: {error}") from error


def _check_size(path: Path) -> None:
    if path.stat().st_size > _MAX_FILE_NBYTES:
        raise InvalidArgumentError(f"{path} has more than {_MAX_FILE_NBYTES} bytes.")


def lines_of(path: Path, most: int) -> Iterator[str]:
    """Yield the lines of a text file.

    Raises
    ------
    ValueError
        For a line of more than `most` characters, and where the file is not UTF-8.
    """
    with path.open(encoding="utf-8") as file:
        while line := file.readline(most + 1):
            if len(line) > most:
                raise ValueError(f"a line has more than {most} characters")
            yield line


def _load(path: Path) -> NDArray[Any]:
    """Map an array; unlike reading, that takes no memory by what the header says."""
    with path.open("rb") as file:
        start = file.read(12)
    if start[:6] != b"\x93NUMPY" or len(start) < 12:
        raise ValueError("it is no .npy file")
    header_nbytes = int.from_bytes(start[8:10] if start[6] == 1 else start[8:12], "little")
    if header_nbytes > _MAX_HEADER_NBYTES:
        raise ValueError(f"its header has {header_nbytes} bytes")
    try:
        found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (SyntaxError, TypeError, OverflowError, TokenError) as error:
        raise ValueError(f"its header is damaged: {error}") from error
    return found


def _parse(line: str, where: str) -> Any:  # noqa: ANN401 - JSON
    try:
        if line.lstrip()[0] in "[{":
            data = json.loads(line)
            names = ("tokens", "token_ids", "input_ids")
            return data if isinstance(data, list) else next(data[name] for name in names if name in data)
        return [int(word) for word in line.replace(",", " ").split()]
    except (ValueError, StopIteration, RecursionError) as error:
        raise InvalidArgumentError(f"{where}: no token ids ({error}).") from error


def _tokens(values: Any, where: str) -> NDArray[np.uint32]:  # noqa: ANN401 - what a file held
    try:
        return np.frombuffer(token_bytes(values), "<u4")
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{where}: {error}") from error


def chain_roots(identity: dict[str, Any], tenants: Sequence[str] = ()) -> Iterator[bytes]:
    """Yield what chains of a namespace may begin with: by salt and adapter, or nothing at all.

    Which of them an engine uses is told by the keys: those that another root makes are in no store.
    """
    adapter = identity.get("adapter")
    for salt in (None, *tenants):
        for name in dict.fromkeys((None, adapter if isinstance(adapter, str) else None)):
            yield key_root(salt, name)
    yield b""


def keys_of_prompts(
    prompts: Sequence[NDArray[np.uint32]], page_tokens: int, identity: dict[str, Any], tenants: Sequence[str]
) -> dict[bytes, NDArray[np.uint32]]:
    """Return the keys that the pages of prompts may have, and the tokens of each page."""
    found: dict[bytes, NDArray[np.uint32]] = {}
    for root in chain_roots(identity, tenants):
        for prompt in prompts:
            for at, key in enumerate(chain_keys(root, prompt, page_tokens)):
                found[key] = prompt[at * page_tokens : (at + 1) * page_tokens]
    return found
