"""Tables of `bench storage`, for a terminal and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hicache_tier.cli.output import show, size, table

from .storage_session import cache_words

if TYPE_CHECKING:
    from collections.abc import Sequence


class Sheet(NamedTuple):
    """A table: its title, its columns (`>` aligns right), and its cells."""

    title: str
    columns: tuple[str, ...]
    cells: list[tuple[str, ...]]

    def markdown(self) -> str:
        """Return it as Markdown."""
        names = [name.removeprefix(">") for name in self.columns]
        rule = ["---:" if name.startswith(">") else "---" for name in self.columns]
        lines = [f"| {' | '.join(row)} |" for row in (names, rule, *self.cells)]
        return "\n".join((self.title, "", *lines))


def print_result(result: dict[str, Any]) -> None:
    """Print a result for people."""
    show(*(table(sheet.title, sheet.columns, sheet.cells) for sheet in sheets(result)), *remarks(result))


def markdown(result: dict[str, Any]) -> str:
    """Return a result as a Markdown document."""
    parts = [sheet.markdown() for sheet in sheets(result)]
    parts.append("\n".join(f"- {line}" for line in remarks(result)))
    return "\n\n".join(parts) + "\n"


def sheets(result: dict[str, Any]) -> list[Sheet]:
    """Return the tables that a result has."""
    found = [_rows(result["rows"], result["host"])] if result["rows"] else []
    if result["peers"]:
        found.append(_peers(result["peers"]))
    of_devices = [row for row in result["rows"] if "device_mode" in row]
    if of_devices:
        found.append(_devices(of_devices))
    return found


def remarks(result: dict[str, Any]) -> list[str]:
    """Return what else is to be said: how the page cache was met, what was refused and left out."""
    lines = [
        f"{cache}: {cache_words(cache)}." for cache in dict.fromkeys(row["cache"] for row in result["rows"])
    ]
    lines += [
        f"AES-GCM: {row['engine']}, {size(row['page_nbytes'])}, {row['mode']}, {_direction(row)}: "
        f"{row['ratio_to_plain']:.2f} of the throughput with checksums alone."
        for row in result["rows"]
        if row["ratio_to_plain"]
    ]
    if result["host"]["link_gb_s"] is None:
        lines.append(
            f"The device's link is not known: {result['host']['link']}. A cache below this machine would not "
            "be seen; --link-gb-s says what the link carries."
        )
    lines += [
        f"Refused: {row['engine']}, {size(row['page_nbytes'])}, {row['direction']}, {row['mode']}: "
        f"{row['reason']}."
        for row in result["refused"]
    ]
    lines += [f"Left out: {row['engine']} {row['mode']}: {row['reason']}." for row in result["left_out"]]
    lines += [f"Left out: peer {row['peer']}: {row['reason']}." for row in result["peers_left_out"]]
    if "bookkeeping" in result:
        book, opened = result["bookkeeping"], result["opening"]
        own = ", ".join(f"{what} {book[f'{what}_us_per_page']:.1f} us a page" for what in ("put", "get"))
        lines += [
            f"Own work, batches of 128: {own}; match_prefix {book['match_keys_per_s'] / 1e6:.1f} M keys/s.",
            f"Opening a store of {opened['slots']:,} pages: {opened['open_seconds']:.2f} s.",
        ]
    return lines


def _rows(rows: Sequence[dict[str, Any]], host: dict[str, Any]) -> Sheet:
    facts = ", ".join(f"{name} {value}" for name, value in host.items() if value is not None)
    return Sheet(
        f"Against a bare loop of the same shape ({facts})",
        (
            *("engine", ">page", "mode", "page cache", "checksums", ">threads", ">depth", "direction"),
            *(">GB/s", ">bare GB/s", ">ratio", ">of posix", ">CPU us/page", ">CPU ratio"),
        ),
        [
            (
                row["engine"],
                *_shape(row),
                str(row["threads"]),
                str(row["depth"]),
                _direction(row),
                f"{row['gb_s']:.2f}" + ("*" if row["above_link"] else ""),
                f"{row['bare_gb_s']:.2f}",
                f"{row['ratio_to_bare']:.2f}",
                f"{row['ratio_to_posix']:.2f}" if row["ratio_to_posix"] else "",
                f"{row['cpu_us_per_page']:.0f}",
                f"{row['cpu_ratio_to_bare']:.2f}",
            )
            for row in rows
        ],
    )


def _peers(rows: Sequence[dict[str, Any]]) -> Sheet:
    return Sheet(
        "Against peers, in turn with them",
        (
            *("peer", ">page", "mode", "page cache", "checksums", "peer's cache", "direction"),
            *(">GB/s", ">peer GB/s", ">ratio"),
        ),
        [
            (
                row["peer"],
                *_shape(row),
                row["peer_cache"],
                row["direction"],
                f"{row['gb_s']:.2f}",
                f"{row['peer_gb_s']:.2f}",
                f"{row['ratio_to_peer']:.2f}",
            )
            for row in rows
        ],
    )


def _devices(rows: Sequence[dict[str, Any]]) -> Sheet:
    return Sheet(
        "From GPU memory, in turn with the way by a pinned host pool and with kvikio on one large file",
        (
            *("engine", ">page", "mode", "page cache", "checksums", "direction"),
            *(">GB/s", ">of host's way", ">of one file", ">staging", ">us/page, no I/O", "how"),
        ),
        [
            (
                row["engine"],
                *_shape(row),
                row["direction"],
                f"{row['gb_s']:.2f}",
                f"{row['ratio_to_host_route']:.2f}",
                f"{row['ratio_to_one_file']:.2f}" if row["ratio_to_one_file"] else "",
                f"{100 * row['staging_share']:.1f} %",
                f"{row['submit_us_per_page']:.1f}",
                row["device_mode"],
            )
            for row in rows
        ],
    )


def _shape(row: dict[str, Any]) -> tuple[str, ...]:
    return size(row["page_nbytes"]), row["mode"], row["cache"], _check(row)


def _check(row: dict[str, Any]) -> str:
    if row["encrypted"]:
        return "AES-GCM"
    return "on" if row["checksums"] else "off"


def _direction(row: dict[str, Any]) -> str:
    return f"{row['read_percent']}% reads" if row["direction"] == "mixed" else str(row["direction"])
