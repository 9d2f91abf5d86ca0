"""A torture from beginning to end: who works where, what is done to them, what came of it."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arena import Arena
from .board import COUNTED
from .disk import mount_small_disk, unmount
from .resources import held, memory_folder, more
from .roles import prepare
from .vandal import Vandal

if TYPE_CHECKING:
    from collections.abc import Callable

    from .post import Post

_MIB = 1 << 20
_TICK_S = 0.02
_KILL_S, _STOP_S, _DAMAGE_S, _MASSACRE_S, _LOOK_S = 1.1, 3.0, 0.4, 6.0, 0.25  # mean time between two
_STOPPED_S = (0.05, 3.0)
_SQUEEZED = (3 * _MIB, 4 * _MIB, 6 * _MIB)
_AFRESH = 0.2  # of all starts: with an interpreter of their own, under another hash seed
_END_S = 30.0


class Every:
    """Says when it is time again, at random around a mean."""

    def __init__(self, mean_s: float, rng: random.Random) -> None:
        self._mean_s, self._random = mean_s, rng
        self._next_s = time.monotonic() + rng.uniform(0.5, 1.5) * mean_s

    def due(self) -> bool:
        """Whether it is time."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._random.uniform(0.1, 1.9) * self._mean_s
        return True


class Session:
    """Everything that is tortured, and what was found.

    Parameters
    ----------
    folder : Path
        An empty directory.
    seed : int
    say : callable
        Told a line now and then.
    """

    def __init__(self, folder: Path, seed: int, say: Callable[[str], object]) -> None:
        self.seed = seed
        self._say = say
        self._random = random.Random(seed)
        self._memory = tempfile.TemporaryDirectory(prefix="hct-torture-", dir=memory_folder())
        scratch = Path(self._memory.name)
        self._findings = scratch / "findings"
        self._small = folder / "small-disk"
        self._small.mkdir()
        self.no_small_disk = mount_small_disk(self._small, 6 * _MIB)
        self.keep = Arena(
            "keep",
            folder / "keep",
            scratch,
            256 * _MIB,
            {"writer": 2, "reader": 1, "exporter": 1},
            strict=True,
            clock_jumps=True,
        )
        self.squeeze = Arena(
            "squeeze",
            folder / "squeeze",
            scratch,
            _SQUEEZED[-1],
            {"writer": 2, "reader": 1, "tier": 1},
            clock_jumps=True,
        )
        self.damage = Arena(
            "damage",
            folder / "damage",
            scratch,
            24 * _MIB,
            {"writer": 2, "reader": 1, "stranger": 1},
            damaged=True,
            verify="always",
            bad_engine=True,
            deadline_s=0.5,
        )
        self.arenas = [self.keep, self.squeeze, self.damage]
        if not self.no_small_disk:
            self.arenas.append(Arena("full", self._small / "root", scratch, 64 * _MIB, {"writer": 2}))
        self.posts = [post for arena in self.arenas for post in arena.posts]
        self.vandal = Vandal(self.damage, self._random)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._squeezing: Post | None = None

    def run(self, seconds: float) -> dict[str, Any]:
        """Torture for so long; return the summary."""
        started_s = time.monotonic()
        try:
            prepare()
            before = held()
            for post in self.posts:
                self._start(post)
            self._torture(started_s + seconds)
            self._end()
            self._look_at_what_is_left()
            summary = self._summary(time.monotonic() - started_s)
        finally:
            for post in self.posts:
                post.kill()
            if not self.no_small_disk:
                unmount(self._small)
        self._memory.cleanup()
        summary["leaks"] += more(held(), before)
        return summary

    # -- while it lasts --------------------------------------------------------------------------------

    def _torture(self, until_s: float) -> None:
        rng = self._random
        kill, stop, damage = Every(_KILL_S, rng), Every(_STOP_S, rng), Every(_DAMAGE_S, rng)
        massacre, look, speak = Every(_MASSACRE_S, rng), Every(_LOOK_S, rng), Every(10.0, rng)
        while time.monotonic() < until_s:
            time.sleep(_TICK_S)
            for post in self.posts:
                post.wake()
                self._tend(post)
            if kill.due():
                rng.choice(self.posts).kill()
            if stop.due():
                rng.choice(self.posts).stop(rng.uniform(*_STOPPED_S))
            if damage.due():
                self.vandal.strike(alone=False)
            if massacre.due():
                self._massacre(rng.choice(self.arenas))
            if look.due():
                self._look_at_occupancy()
            if speak.due():
                self._say(self._progress())

    def _start(self, post: Post) -> None:
        post.start(self._random.randrange(1 << 31), afresh=self._random.random() < _AFRESH)

    def _tend(self, post: Post) -> None:
        """Start a process anew where it has ended; one that is stuck is killed."""
        code = post.poll()
        if code is None and post.stuck():
            self.counts["stuck_calls"] += 1
            self.problems.append(f"{post.name}: an operation did not end in time")
            post.kill()
        elif code is None:
            return
        elif not post.killed and code:
            self.counts["crashes"] += 1
            self.problems.append(f"{post.name} ended with {code}: {post.last_words()}")
        self._start(post)

    def _massacre(self, arena: Arena) -> None:
        """Kill everybody in an arena at once, and change what can only be changed then."""
        for post in arena.posts:
            post.kill()
        self.counts["massacres"] += 1
        if arena is self.damage:
            for _ in range(3):
                self.vandal.strike(alone=True)
        if arena is self.squeeze:
            capacity = self._random.choice(_SQUEEZED)
            arena.allow(capacity)
            self.counts["capacities_lowered"] += capacity < arena.capacity_nbytes
            arena.capacity_nbytes = max(arena.capacity_nbytes, capacity)
            self._squeezing = arena.writers[0]

    def _look_at_occupancy(self) -> None:
        """Compare what roots hold with what they may hold."""
        if self._squeezing is not None and self._squeezing.running:
            self.squeeze.capacity_nbytes = self._squeezing.duty.capacity_bytes
            self._squeezing = None
        for arena in self.arenas:
            if arena.damaged:
                continue
            excess = arena.excess_nbytes()
            if excess > 0:
                self.counts["over_capacity"] += 1
                self.problems.append(f"{arena.name}: {excess} bytes above its capacity and a batch a writer")

    # -- at the end ------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Have everybody end in order."""
        for post in self.posts:
            post.wake(now=True)
            post.ask_to_end()
        until_s = time.monotonic() + _END_S
        for post in self.posts:
            if not post.ended(until_s) and not post.killed:
                self.counts["stuck_calls"] += post.code is None
                self.counts["crashes"] += bool(post.code)
                self.problems.append(f"{post.name} did not end in order: {post.code}")

    def _look_at_what_is_left(self) -> None:
        """Count files that nobody will finish."""
        for arena in self.arenas:
            left = [] if arena.damaged else arena.leftovers()
            if left:
                self.counts["leaks"] += len(left)
                self.problems.append(f"{arena.name}: left behind: {left[:5]}")

    def _totals(self) -> dict[str, int]:
        return {field.name.lower(): sum(post.board[field] for post in self.posts) for field in COUNTED}

    def _summary(self, seconds: float) -> dict[str, Any]:
        totals = self._totals()
        if self._findings.exists():
            self.problems += self._findings.read_text().splitlines()
        slowest_s, slowest = max(post.board.slowest for post in self.posts)
        return {
            "kills": sum(post.kills for post in self.posts),
            "reads_checked": totals["reads"],
            "wrong_bytes": totals["wrong"],
            "stuck_calls": self.counts["stuck_calls"],
            "leaks": totals["leaks"] + self.counts["leaks"],
            "seconds": round(seconds, 1),
            "seed": self.seed,
            "missing": totals["missing"],
            "verified_after_restart": totals["verified"],
            "over_capacity": self.counts["over_capacity"],
            "crashes": self.counts["crashes"],
            "errors": totals["errors"],
            "stops": sum(post.stops for post in self.posts),
            "massacres": self.counts["massacres"],
            "capacities_lowered": self.counts["capacities_lowered"],
            "pages_stored": totals["stored"],
            "refused": totals["refused"],
            "misses": totals["missed"],
            "late_pages": totals["late"],
            "exports": totals["exports"],
            "damage": {**self.vandal.done, "foreign_zarr_writes": totals["foreign_writes"]},
            "full_disk": self.no_small_disk or "tmpfs",
            "slowest_call": {"name": slowest, "seconds": round(slowest_s, 2)},
            "problems": self.problems[:20],
        }

    def _progress(self) -> str:
        totals = self._totals()
        kills = sum(post.kills for post in self.posts)
        return f"{kills} kills, {totals['reads']} pages read and checked, {totals['wrong']} wrong"


FINDINGS = ("wrong_bytes", "stuck_calls", "leaks", "missing", "over_capacity", "crashes", "errors")
