"""One root that is tortured, and who works in it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_tier_storage.capacity import partition_paths

from .duty import Duty
from .pages import BATCH, PAGE_NBYTES
from .post import Post

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from hicache_tier_storage.partition_files import PartitionPaths


class Arena:
    """A root and its posts.

    Parameters
    ----------
    name : str
    root : Path
    scratch : Path
        For boards and findings.
    capacity_nbytes : int
    roles : mapping of str to int
        How many posts of each role.
    **duty
        As of `Duty`.

    Attributes
    ----------
    capacity_nbytes : int
        What the root must keep to now.
    damaged : bool
        Whether files are damaged there.
    """

    def __init__(
        self,
        name: str,
        root: Path,
        scratch: Path,
        capacity_nbytes: int,
        roles: Mapping[str, int],
        *,
        damaged: bool = False,
        **duty: object,
    ) -> None:
        self.name, self.root, self.damaged = name, root, damaged
        self.capacity_nbytes = capacity_nbytes
        self.posts: list[Post] = []
        for role, count in roles.items():
            for number in range(count):
                title = f"{name}-{role}{number}"
                self.posts.append(
                    Post(
                        title,
                        Duty(
                            role=role,
                            root=str(root),
                            arena=name,
                            board=str(scratch / f"{title}.board"),
                            log=str(scratch / "findings"),
                            seed=0,
                            capacity_bytes=capacity_nbytes,
                            **duty,  # type: ignore[arg-type]
                        ),
                    )
                )

    @property
    def writers(self) -> list[Post]:
        """Posts that write."""
        return [post for post in self.posts if post.duty.role == "writer"]

    def allow(self, capacity_nbytes: int) -> None:
        """Have those who are started from now on keep to another capacity."""
        for post in self.posts:
            post.duty = replace(post.duty, capacity_bytes=capacity_nbytes)

    def excess_nbytes(self) -> int:
        """Bytes that the root holds beyond its capacity and a batch a writer."""
        batch = BATCH * PAGE_NBYTES * len(self.writers)
        return sum(map(_slabs_nbytes, self.partitions())) - self.capacity_nbytes - batch

    def partitions(self) -> Iterator[PartitionPaths]:
        """Walk the partitions."""
        return partition_paths(self.root) if self.root.is_dir() else iter(())

    def leftovers(self) -> list[str]:
        """Files that are not finished and that nobody is at work on."""
        return sorted(
            str(path.relative_to(self.root))
            for pattern in ("*.tmp", ".hct-probe-*")
            for path in self.root.rglob(pattern)
        )


def _slabs_nbytes(paths: PartitionPaths) -> int:
    """Bytes that slabs and tables occupy, as the file system counts them."""
    total = 0
    for folder in (paths.pages, paths.slots):
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            try:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
