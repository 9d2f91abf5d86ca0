"""What an operator may write into `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Self

from hicache_tier.errors import InvalidArgumentError, not_known

if TYPE_CHECKING:
    from collections.abc import Mapping

# What SGLang itself reads from the same object, or adds to it.
_SGLANG: Final = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "file_storage_path",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
# SGLang waits 10 s for its storage threads when it detaches, and one batch may be two calls.
_MOST_DEADLINE_S: Final = 4.0
_TEXTS: Final = ("model", "model_revision", "weight_version", "tenant", "adapter", "scales", "rope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the adapter, checked.

    Attributes
    ----------
    root : str or tuple of str
        Directory of the store, or one a drive. `root` takes either, `roots` a list; one of them is needed.
    capacity_bytes : int or str, optional
        Cap on the root, for all ranks and pools together, as bytes or `"2 TiB"`.
    engine, io_mode, threads, verify, checksums, read_only, access, owners
        As of `hicache_tier.open_store`.
    encryption : str, optional
        Path of a key file, or `env:NAME`, as of `hicache_tier.open_store`.
    model : str, optional
        Name of the model in the identity, where the path that SGLang was given differs from host to host.
    model_revision, weight_version : str, optional
        Pages stored under another value are misses. To be changed with the weights.
    tenant, adapter, scales, rope : str, optional
        As of `hicache_tier.open_store`.
    deadline_s : float
        Seconds that one call may take; what is not done by then is a miss, or not stored. 3 by default, 4 at
        most.
    probe_interval_s : float
        Seconds until storage that missed a deadline is tried again; doubled after each failure. 1 by default.
    threads_per_direction : int
        Calls under way at the same time, hung ones included, each for reads and for writes. 8 by default.
    metrics : bool
        Whether to count for Prometheus; True by default.
    metrics_port : int, optional
        Serve the metrics at this port, plus the number of the rank. Default: they are in the host process's
        registry, with SGLang's own.
    metrics_address : str
        Address of that port; `127.0.0.1` by default, which other hosts do not reach.
    """

    root: str | tuple[str, ...]
    capacity_bytes: int | str | None = None
    engine: str = "auto"
    io_mode: str = "auto"
    threads: int | None = None
    verify: str = "suspect"
    checksums: bool = True
    read_only: bool = False
    access: str = "private"
    owners: str = "self"
    encryption: str | None = None
    model: str | None = None
    model_revision: str | None = None
    weight_version: str | None = None
    tenant: str | None = field(default=None, repr=False)
    adapter: str | None = None
    scales: str | None = None
    rope: str | None = None
    deadline_s: float = 3.0
    probe_interval_s: float = 1.0
    threads_per_direction: int = 8
    metrics: bool = True
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> Self:
        """Check the extra config.

        Raises
        ------
        InvalidArgumentError
            For an option that is not known, with the nearest name, or a value that is not allowed.
        """
        options = {name: value for name, value in (given or {}).items() if name not in _SGLANG}
        allowed = sorted([*(known.name for known in fields(cls)), "roots"])
        for name in options:
            if name not in allowed:
                raise not_known("option", name, allowed)
        options["root"] = _root(options.pop("root", None), options.pop("roots", None))
        checked = cls(**options)
        checked._check()
        return checked

    @property
    def revision(self) -> str | None:
        """Revision of the identity: that of the model, that of the weights, or both."""
        if self.weight_version is None:
            return self.model_revision
        weights = f"weights {self.weight_version}"
        return weights if self.model_revision is None else f"{self.model_revision}, {weights}"

    def _check(self) -> None:
        for name in ("checksums", "read_only", "metrics"):
            _expect(name, getattr(self, name), bool, "true or false")
        for name in ("engine", "io_mode", "verify", "access", "owners", "metrics_address"):
            _expect(name, getattr(self, name), str, "text")
        for name in (*_TEXTS, "encryption"):
            if getattr(self, name) is not None:
                _expect(name, getattr(self, name), str, "text")
        if self.capacity_bytes is not None:
            _expect("capacity_bytes", self.capacity_bytes, (int, str), 'bytes, or text like "2 TiB"')
        if self.threads is not None:
            _whole("threads", self.threads, 1, 1024)
        _whole("threads_per_direction", self.threads_per_direction, 1, 256)
        if self.metrics_port is not None:
            _whole("metrics_port", self.metrics_port, 1, 65535)
        _seconds("deadline_s", self.deadline_s, _MOST_DEADLINE_S)
        _seconds("probe_interval_s", self.probe_interval_s, 3600.0)


def _root(root: object, roots: object) -> str | tuple[str, ...]:
    if (root is None) == (roots is None):
        said = "both are given" if root is not None else "neither is given"
        raise InvalidArgumentError(f"name the store's directory as `root`, or several as `roots`: {said}.")
    value = root if root is not None else roots
    if isinstance(value, str) and value and roots is None:
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(one, str) and one for one in value):
        return tuple(value)
    raise InvalidArgumentError(f"root must be a path, roots a list of paths, got {value!r}.")


def _expect(name: str, value: object, kind: type | tuple[type, ...], said: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        shown = type(value).__name__ if name == "tenant" else repr(value)
        raise InvalidArgumentError(f"{name} must be {said}, got {shown}.")
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise InvalidArgumentError(f"{name} is not valid Unicode: it has half a character.")


def _whole(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidArgumentError(f"{name} must be a whole number from {least} to {most}, got {value!r}.")


def _seconds(name: str, value: object, most: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
        raise InvalidArgumentError(f"{name} must be seconds above 0, at most {most:g}, got {value!r}.")
