"""Timed exports and imports, each in turn with a plain copy of the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from hicache_tier_storage.archive import Conversion, export_archive, import_archive

from .archive_load import puts_while_exporting
from .archive_rig import RANKS, ArchiveRig
from .errors import BenchError
from .timing import Contestant, Samples, ratio, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_tier_storage.archive import ImportReport

_KEPT = Conversion()
_LAYERS = Conversion.parse(layout="layer_first")
_HEADS = Conversion.parse(layout="page_head")
_HALF = Conversion.parse(tp=RANKS // 2)
_CODECS = ("fast", "small", "zstd")


class ArchiveBench:
    """All measurements of archives in one folder.

    Parameters
    ----------
    rig : ArchiveRig
    repeats : int
        Turns of each; medians count.
    tick : callable
        Called after each run.
    """

    def __init__(self, rig: ArchiveRig, repeats: int, tick: Callable[[], None]) -> None:
        self._rig = rig
        self._repeats = repeats
        self._tick = tick

    def prepare(self) -> None:
        """Make stores and archives, and compare every byte after a conversion there and back."""
        rig = self._rig
        for name, ranks in (("one", 1), ("ranks", RANKS)):
            export_archive(rig.fill(f"store-{name}", ranks), rig.path(f"archive-{name}"))
        rig.check("archive-one", _LAYERS, Conversion.parse(layout="page_first"))
        rig.check("archive-one", _HEADS, Conversion.parse(layout="page_first"))
        rig.check("archive-ranks", _HALF, Conversion.parse(tp=RANKS))
        with rig.path("plain").open("wb") as file:
            for shard in sorted(rig.path("archive-one").rglob("pages/c.*")):
                file.write(shard.read_bytes())
            file.truncate(rig.nbytes)
            file.flush()
            os.fsync(file.fileno())

    # -- exports ---------------------------------------------------------------------------------------

    def exports(self) -> list[dict[str, Any]]:
        """Time exports without a codec against `cp`, both left in the page cache or both on disk."""
        rows = []
        for sync in (False, True):
            samples = take_turns(
                [
                    Contestant("cp", partial(self._copy, sync=sync), self._clean),
                    Contestant("ours", partial(self._export, sync=sync), self._clean),
                ],
                self._repeats,
                self._tick,
            )
            name = "export, on disk" if sync else "export"
            rows.append(self._row(name, samples, "cp and fsync" if sync else "cp", "cp"))
        return rows

    def codecs(self) -> list[dict[str, Any]]:
        """Time exports with each codec: per second of CPU time, which is what a core does."""
        contestants = [Contestant(codec, partial(self._export, codec), self._clean) for codec in _CODECS]
        samples = take_turns(contestants, max(1, self._repeats // 2), self._tick)
        return [
            {
                "what": f"export --codec {codec}",
                "gb_s": self._rig.nbytes / samples[codec].seconds / 1e9,
                "gb_s_a_core": self._rig.nbytes / samples[codec].cpu_seconds / 1e9,
            }
            for codec in _CODECS
        ]

    def _clean(self) -> None:
        self._rig.drop("copy", "out", "in")

    def _copy(self, *, sync: bool) -> None:
        source, target = self._rig.path("plain"), self._rig.path("copy")
        subprocess.run(["/bin/cp", "--reflink=never", source, target], check=True)
        if sync:
            fd = os.open(target, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    def _export(self, codec: str = "none", *, sync: bool = False) -> None:
        report = export_archive(self._rig.path("store-one"), self._rig.path("out"), codec=codec, sync=sync)
        if report.pages != self._rig.pages:
            raise BenchError(f"{report.pages} of {self._rig.pages} pages were exported: {report.left_out}")

    # -- imports ---------------------------------------------------------------------------------------

    def imports(self) -> list[dict[str, Any]]:
        """Time imports against `cp`, and converting ones against the unconverted."""
        served: dict[str, list[float]] = {}

        def plain() -> None:
            self._import("archive-one", _KEPT, served.setdefault("plain", []))

        copies = take_turns(
            [
                Contestant("cp", partial(self._copy, sync=False), self._clean),
                Contestant("synced", partial(self._copy, sync=True), self._clean),
                Contestant("ours", plain, self._clean),
            ],
            self._repeats,
            self._tick,
        )
        rows = [self._row("import, on disk", copies, "cp and fsync", "synced")]
        until = {"cp": copies["cp"], "ours": Samples(served["plain"][1:], copies["ours"].cpu)}
        rows.insert(0, self._row("import, until all is served", until, "cp", "cp"))
        for name, archive, conversion in (
            ("import --layout layer_first", "archive-one", _LAYERS),
            ("import --layout page_head", "archive-one", _HEADS),
            (f"import --tp {RANKS // 2} of {RANKS} ranks", "archive-ranks", _HALF),
        ):
            times: dict[str, list[float]] = {"kept": [], "ours": []}
            samples = take_turns(
                [
                    Contestant("kept", partial(self._import, archive, _KEPT, times["kept"]), self._clean),
                    Contestant(
                        "ours", partial(self._import, archive, conversion, times["ours"]), self._clean
                    ),
                ],
                self._repeats,
                self._tick,
            )
            for side, seconds in times.items():
                samples[side].wall = seconds[1:]
            rows.append(self._row(name, samples, "import unconverted", "kept"))
        return rows

    def _import(self, archive: str, conversion: Conversion, served: list[float]) -> None:
        """Import; note when the last page was there to be served, which is before the store is closed."""
        last, began = [0.0], time.perf_counter()

        def note(done: int, total: int) -> None:
            if done == total:
                last[0] = time.perf_counter() - began

        report = import_archive(
            self._rig.path(archive),
            self._rig.path("in"),
            conversion=conversion,
            capacity_bytes=self._rig.capacity,
            progress=note,
        )
        _whole(report)
        served.append(last[0])

    def load(self) -> dict[str, Any]:
        """Measure puts as fast as they go, with and without exports of the same store by another process."""
        return puts_while_exporting(self._rig, self._repeats, self._tick)

    # -- memory ----------------------------------------------------------------------------------------

    def memory(self) -> dict[str, Any]:
        """Peak memory of an export and an import in processes of their own, bytes."""
        rig = self._rig
        rig.drop("out", "in")
        verbs = {
            "export": ["export", str(rig.path("store-one")), str(rig.path("out")), "--codec", "fast"],
            "import": [
                "import",
                str(rig.path("archive-one")),
                str(rig.path("in")),
                "--capacity",
                str(rig.capacity),
            ],
        }
        found = {verb: _peak(arguments) for verb, arguments in verbs.items()}
        self._tick()
        return {"what": "peak memory", **{f"{verb}_bytes": nbytes for verb, nbytes in found.items()}}

    def _row(self, what: str, samples: dict[str, Samples], against: str, other: str) -> dict[str, Any]:
        ours, theirs = samples["ours"], samples[other]
        return {
            "what": what,
            "gb_s": self._rig.nbytes / ours.seconds / 1e9,
            "against": against,
            "against_gb_s": self._rig.nbytes / theirs.seconds / 1e9,
            "ratio": ratio(ours.wall, theirs.wall),
        }


def _whole(report: ImportReport) -> None:
    if report.refused:
        raise BenchError(f"pages were refused: {report.refused}")


def _peak(arguments: list[str]) -> int:
    """Run a verb; return its process's peak resident memory, as the kernel has it once it is done."""
    code = (
        "import sys\n"
        "from hicache_tier.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    print(*[line.split()[1] for line in lines if line.startswith('VmHWM')], file=sys.stderr)\n"
        "    raise\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--json"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BenchError(f"{arguments[0]} failed: {done.stdout[-500:]} {done.stderr[-500:]}")
    return int(done.stderr.split()[-1]) * 1024
