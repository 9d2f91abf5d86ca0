"""Page keys: what a page of KV is called.

A key is the SHA-256 digest of everything that the page's KV depends on besides the model: the tokens of
the page, all tokens before it, and the namespace of salt and adapter. It is chained, so that equal keys mean
equal prefixes, and a prefix is found page by page.

Byte layout, all integers little-endian, `||` joins:

- `field(tag, None) = tag || 00`; `field(tag, text) = tag || 01 || u32 length in bytes || UTF-8 bytes`,
  with the one-byte tags `53` (salt) and `41` (adapter);
- `root = SHA-256("hicache_tier.keys.v1" || field(53, salt) || field(41, adapter))`, the 20 name bytes ASCII;
- `key[-1] = root`, `key[i] = SHA-256(key[i - 1] || u32 of each of the page_tokens tokens of page i)`.

Model, dtype, layout, page size in tokens and rank are the business of the store's namespace, not of a key.
"""

from __future__ import annotations

import sys
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import InvalidArgumentError
from .geometry import positive

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    Tokens = Sequence[int] | NDArray[np.integer[Any]] | torch.Tensor

TOKEN_NBYTES = 4
_DOMAIN = b"hicache_tier.keys.v1"
_SALT = b"S"
_ADAPTER = b"A"
_MAX_TOKEN = 0xFFFF_FFFF


def page_keys(
    token_ids: Tokens, page_tokens: int, *, salt: str | None = None, adapter: str | None = None
) -> list[bytes]:
    """Return the keys of all full pages of a prompt; tokens after the last full page have none yet.

    Parameters
    ----------
    token_ids : list, tuple, range, numpy array or torch tensor
        Token ids in 0 .. 2**32 - 1, one axis, any integer dtype; a tensor may be on any device.
    page_tokens : int
        Tokens a page.
    salt : str, optional
        Tenant's salt. Absent and empty are two different namespaces.
    adapter : str, optional
        Name of the adapter (LoRA) that computed the KV. Absent and empty differ here too.

    Returns
    -------
    list[bytes]
        `len(token_ids) // page_tokens` keys of 32 bytes; the module's text states their byte layout.

    Raises
    ------
    InvalidArgumentError
        Tokens that are not whole numbers in range or not one axis, a page size below 1, a salt or adapter
        that is not text. Nothing is hashed before all of it is checked.
    """
    return chain_keys(key_root(salt, adapter), token_ids, page_tokens)


def chain_keys(parent: bytes, token_ids: Tokens, page_tokens: int) -> list[bytes]:
    """Return the keys of all full pages that continue a chain.

    Parameters
    ----------
    parent : bytes
        Key of the page before them, or `key_root` where there is none.
    token_ids, page_tokens
        As for `page_keys`, and so are the errors.
    """
    size = positive("page_tokens", page_tokens)
    return _chain(parent, token_bytes(token_ids), size)


class KeyChain:
    """Keys of one request that grows: prefill first, then token by token while it decodes.

    Parameters
    ----------
    page_tokens : int
        Tokens a page.
    salt, adapter : str, optional
        As for `page_keys`.

    Attributes
    ----------
    keys : list[bytes]
        Keys of all pages that are full so far; equal to `page_keys` of all tokens given.
    """

    __slots__ = ("_page_nbytes", "_rest", "_root", "keys", "page_tokens")

    def __init__(self, page_tokens: int, *, salt: str | None = None, adapter: str | None = None) -> None:
        self.page_tokens = positive("page_tokens", page_tokens)
        self.keys: list[bytes] = []
        self._root = key_root(salt, adapter)
        self._page_nbytes = self.page_tokens * TOKEN_NBYTES
        self._rest = b""

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far, those of the unfinished page included."""
        return len(self.keys) * self.page_tokens + len(self._rest) // TOKEN_NBYTES

    def extend(self, token_ids: Tokens) -> list[bytes]:
        """Append tokens; return the keys of the pages that they completed (often none).

        Raises
        ------
        InvalidArgumentError
            As for `page_keys`; the chain is as it was before the call.
        """
        data = self._rest + token_bytes(token_ids)
        parent = self.keys[-1] if self.keys else self._root
        fresh = _chain(parent, data, self.page_tokens)
        self._rest = data[len(fresh) * self._page_nbytes :]
        self.keys += fresh
        return fresh


def key_root(salt: str | None, adapter: str | None) -> bytes:
    """Return what the keys of a namespace of salt and adapter are chained to."""
    return sha256(_DOMAIN + _field("salt", _SALT, salt) + _field("adapter", _ADAPTER, adapter)).digest()


def _field(name: str, tag: bytes, value: str | None) -> bytes:
    if value is None:
        return tag + b"\x00"
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{name} must be text or None, got {value!r}.")
    try:
        data = value.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{name} {value!r} has no UTF-8 form (a lone surrogate).") from None
    return tag + b"\x01" + len(data).to_bytes(4, "little") + data


def _chain(parent: bytes, data: bytes, page_tokens: int) -> list[bytes]:
    """Hash each full page of `data` (tokens as u32) onto the page before it."""
    step = page_tokens * TOKEN_NBYTES
    keys = []
    for start in range(0, len(data) - step + 1, step):
        parent = sha256(parent + data[start : start + step]).digest()
        keys.append(parent)
    return keys


def token_bytes(token_ids: object) -> bytes:
    """Return tokens as consecutive little-endian u32; raises as `page_keys` does."""
    array = _token_array(token_ids)
    if array.ndim != 1:
        raise InvalidArgumentError(f"token_ids must have one axis, got shape {tuple(array.shape)}.")
    if array.size == 0:
        return b""
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > _MAX_TOKEN:
        seen = low if low < 0 else high
        where = int(array.argmin() if low < 0 else array.argmax())
        raise InvalidArgumentError(f"token id {seen} at position {where} is outside 0 .. {_MAX_TOKEN}.")
    return array.astype("<u4", copy=False).tobytes()


def _token_array(token_ids: object) -> NDArray[Any]:
    if isinstance(token_ids, (list, tuple, range)):
        return _from_sequence(token_ids)
    torch = sys.modules.get("torch")  # a tensor can only exist where torch is imported already
    if torch is not None and isinstance(token_ids, torch.Tensor):
        if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
            raise InvalidArgumentError(f"token_ids must be an integer tensor, got {token_ids.dtype}.")
        array: NDArray[Any] = token_ids.detach().cpu().numpy()
        return array
    if isinstance(token_ids, np.ndarray):
        if token_ids.dtype.kind not in "iu":
            raise InvalidArgumentError(f"token_ids must be an integer array, got dtype {token_ids.dtype}.")
        return token_ids
    raise InvalidArgumentError(
        "token_ids must be a list, tuple or range of ints, a numpy array or a torch tensor, "
        f"got {type(token_ids).__name__}."
    )


def _from_sequence(tokens: Sequence[object]) -> NDArray[Any]:
    if not len(tokens):
        return np.empty(0, np.int64)
    wrong = [t for t in set(map(type, tokens)) if t is bool or not issubclass(t, (int, np.integer))]
    if wrong:
        where, value = next((i, v) for i, v in enumerate(tokens) if type(v) in wrong)
        raise InvalidArgumentError(
            f"token id {value!r} at position {where} is a {type(value).__name__}, not a whole number; "
            "token_ids must be one flat run of ints."
        )
    try:
        return np.asarray(tokens, np.int64)
    except OverflowError:
        where, value = next(
            (i, v)
            for i, v in enumerate(tokens)
            if not 0 <= int(v) <= _MAX_TOKEN  # type: ignore[call-overload]
        )
        raise InvalidArgumentError(
            f"token id {value} at position {where} is outside 0 .. {_MAX_TOKEN}."
        ) from None
