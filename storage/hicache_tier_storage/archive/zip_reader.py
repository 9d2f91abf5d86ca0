"""Members of a zip file that are stored, found without unpacking anything.

Only what exports write is taken: members that are not compressed, not encrypted and lie within the file. So a
small file never becomes a large one, and no name of a member ever becomes a path.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .errors import ArchiveError, NotAnArchiveError

if TYPE_CHECKING:
    from pathlib import Path

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MOST_MEMBERS: Final = 1 << 20
_MOST_DIRECTORY_NBYTES: Final = 256 << 20
_MARK32, _MARK16 = 0xFFFF_FFFF, 0xFFFF


@dataclass(frozen=True, slots=True)
class Member:
    """Where a member's local header lies, and how many bytes it holds."""

    header: int
    nbytes: int


def read_directory(fd: int, path: Path) -> dict[str, Member]:
    """Return the members of a zip file by name.

    Raises
    ------
    NotAnArchiveError
        Where it is no zip file, or a truncated one.
    ArchiveError
        Naming the first member that no export writes.
    """
    size = os.fstat(fd).st_size
    count, nbytes, offset = _end(fd, size, path)
    if count > _MOST_MEMBERS or nbytes > _MOST_DIRECTORY_NBYTES:
        raise ArchiveError(f"{path} says that it holds {count} members in a directory of {nbytes} bytes.")
    if offset + nbytes > size or count * _CENTRAL.size > nbytes:
        raise NotAnArchiveError(f"{path}: its directory lies outside of the file; it is cut or damaged.")
    raw = os.pread(fd, nbytes, offset)
    members: dict[str, Member] = {}
    at = 0
    for _ in range(count):
        at = _take(raw, at, size, path, members)
    return members


def data_offset(fd: int, member: Member, path: Path) -> int:
    """Return where the bytes of a member begin."""
    size = os.fstat(fd).st_size
    raw = os.pread(fd, _LOCAL.size, member.header)
    if len(raw) < _LOCAL.size or raw[:4] != b"PK\x03\x04":
        raise ArchiveError(f"{path}: no member begins at byte {member.header}.")
    fields = _LOCAL.unpack(raw)
    start = int(member.header + _LOCAL.size + fields[9] + fields[10])
    if start + member.nbytes > size:
        raise ArchiveError(f"{path}: the member at byte {member.header} ends behind the file.")
    return start


def _end(fd: int, size: int, path: Path) -> tuple[int, int, int]:
    """Return the number of members, and size and offset of the directory."""
    tail_nbytes = min(size, _END.size + _MARK16)
    tail = os.pread(fd, tail_nbytes, size - tail_nbytes)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < _END.size:
        raise NotAnArchiveError(f"{path} is no zip file, or a truncated one.")
    _, disk, _, _, count, nbytes, offset, _ = _END.unpack_from(tail, at)
    if count == _MARK16 or _MARK32 in {nbytes, offset}:
        where = size - tail_nbytes + at - _END64_LOCATOR.size
        raw = os.pread(fd, _END64_LOCATOR.size, where) if where >= 0 else b""
        if len(raw) < _END64_LOCATOR.size or raw[:4] != b"PK\x06\x07":
            raise NotAnArchiveError(f"{path}: its 64-bit directory is missing.")
        (end64,) = struct.unpack_from("<Q", raw, 8)
        raw = os.pread(fd, _END64.size, end64) if end64 < size else b""
        if len(raw) < _END64.size or raw[:4] != b"PK\x06\x06":
            raise NotAnArchiveError(f"{path}: its 64-bit directory is damaged.")
        disk, count, nbytes, offset = (_END64.unpack(raw)[field] for field in (4, 7, 8, 9))
    if disk:
        raise ArchiveError(f"{path} is one volume of several.")
    return int(count), int(nbytes), int(offset)


def _take(raw: bytes, at: int, size: int, path: Path, members: dict[str, Member]) -> int:
    """Enter one entry of the directory; return where the next begins."""
    if len(raw) - at < _CENTRAL.size or raw[at : at + 4] != b"PK\x01\x02":
        raise NotAnArchiveError(f"{path}: its directory is damaged at byte {at}.")
    fields = _CENTRAL.unpack_from(raw, at)
    flags, method = fields[3], fields[4]
    packed, nbytes = fields[8], fields[9]
    name_nbytes, extra_nbytes, comment_nbytes, header = fields[10], fields[11], fields[12], fields[16]
    start = at + _CENTRAL.size
    end = int(start + name_nbytes + extra_nbytes + comment_nbytes)
    name = raw[start : start + name_nbytes].decode("utf-8", "replace")
    extra = raw[start + name_nbytes : start + name_nbytes + extra_nbytes]
    nbytes, packed, header = _wide(extra, nbytes, packed, header)
    if name.endswith("/") and not nbytes:
        return end
    if method or packed != nbytes or flags & 1:
        raise ArchiveError(
            f"{path}: member {name!r} is compressed or encrypted; archives hold stored members only. "
            "Unpack it and import the folder."
        )
    if header + nbytes > size:
        raise ArchiveError(f"{path}: member {name!r} says {nbytes} bytes, more than the file has.")
    if name in members:
        raise ArchiveError(f"{path}: member {name!r} is there twice.")
    members[name] = Member(header, nbytes)
    return end


def _wide(extra: bytes, nbytes: int, packed: int, header: int) -> tuple[int, int, int]:
    """Return the fields of a member with their 64-bit forms where the short ones say so."""
    at = 0
    while len(extra) - at >= 4:
        tag, length = struct.unpack_from("<2H", extra, at)
        body = extra[at + 4 : at + 4 + length]
        if tag == 1:
            wide = iter(struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]))
            nbytes = next(wide, nbytes) if nbytes == _MARK32 else nbytes
            packed = next(wide, packed) if packed == _MARK32 else packed
            header = next(wide, header) if header == _MARK32 else header
            break
        at += 4 + length
    return nbytes, packed, header
