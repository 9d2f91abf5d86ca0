"""Changes to valid input: few, and such as parsers get wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

_NUMBERS = (
    0,
    1,
    2,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFF_FFFF,
    0x8000_0000,
    0xFFFF_FFFF,
    1 << 40,
    1 << 62,
)
_WORDS = (
    *(
        b"null",
        b"true",
        b"-1",
        b"0",
        b"1e999",
        b"1E400",
        b"NaN",
        b"99999999999999999999",
        b'""',
        b"[]",
        b"{}",
    ),
    *(b"[[[[[[[[", b'"../../x"', b'"\\u0000"', b'"\\ud800"', b"1.5", b"4294967296", b"18446744073709551616"),
)
_MOST_NBYTES = 1 << 16


def mutant(seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """Return a seed with one to eight changes."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 8)):
        _change(data, seeds, rng)
    return bytes(data[:_MOST_NBYTES])


def _change(data: bytearray, seeds: Sequence[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(8)
    if kind == 0 and data:
        data[at % len(data)] ^= 1 << rng.randrange(8)
    elif kind == 1 and data:
        data[at % len(data)] = rng.randrange(256)
    elif kind == 2:
        number = rng.choice(_NUMBERS) + rng.choice((0, 0, 1))
        width = rng.choice((1, 2, 4, 8))
        data[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    elif kind == 3:
        del data[at : at + rng.choice((1, 2, 8, 64, 4096))]
    elif kind == 4:
        data[at:at] = data[rng.randrange(len(data) + 1) :][: rng.choice((1, 8, 128))]
    elif kind == 5:
        other = rng.choice(seeds)
        start = rng.randrange(len(other) + 1)
        data[at:] = other[start:]
    elif kind == 6:
        data[at : at + rng.choice((0, 1, 4))] = rng.choice(_WORDS)
    else:
        data[at : at + 8] = rng.randbytes(rng.randrange(9))
