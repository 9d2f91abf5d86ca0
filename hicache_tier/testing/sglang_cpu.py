"""The real `sglang` package on a machine without a GPU: what it lacks there, and a server's context.

`prepare()` comes before the first import of `sglang`. It hides that torchvision is missing, has host pools
copy with torch, and leaves memory unregistered; all else is SGLang's own code.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import ExitStack
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def available() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("sglang") is not None


class _NoVision(MetaPathFinder, Loader):
    """Stands for torchvision: its names are there, and empty."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for torchvision alone."""
        del path, target
        if fullname.partition(".")[0] != "torchvision":
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make an empty module that has any name it is asked for."""
        module = ModuleType(spec.name)
        module.__path__ = []

        def name_of(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = name_of  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def prepare() -> None:
    """Make `sglang` importable and usable here; once a process."""
    if "sglang.srt.mem_cache.pool_host.mha" in sys.modules:
        return
    from transformers.utils import import_utils

    if not import_utils.is_torchvision_available():  # transformers must know that it is not there
        sys.meta_path.insert(0, _NoVision())
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    common._cuda_host_register = lambda *_, **__: None  # noqa: SLF001 - there is no CUDA here
    for owner in (MHATokenToKVPoolHost, AsymmetricMHATokenToKVPoolHost):
        owner.backup_from_device_all_layer = _backup_mha
        owner.load_to_device_per_layer = _load_mha
    MLATokenToKVPoolHost.backup_from_device_all_layer = _backup_mla
    MLATokenToKVPoolHost.load_to_device_per_layer = _load_mla


# Axes of one component of a host pool, by layout: p page, s slot (page and token as one), l layer, t token.
_AXES = {
    "layer_first": "lshd",
    "page_first": "slhd",
    "page_first_direct": "plthd",
    "page_head": "phtld",
}


def rows_of(buffer: torch.Tensor, layout: str, layer: int, slots: torch.Tensor, page: int) -> torch.Tensor:
    """Return rows `[n, h, d]` of a host pool's component, a copy."""
    part, numbers = _layer_of(buffer, layout, layer), slots.cpu()
    if "s" in _AXES[layout]:
        return part[numbers]
    return part[numbers // page, numbers % page]


def _set_rows(
    buffer: torch.Tensor, layout: str, layer: int, slots: torch.Tensor, *, page: int, rows: torch.Tensor
) -> None:
    part, numbers = _layer_of(buffer, layout, layer), slots.cpu()
    if "s" in _AXES[layout]:
        part[numbers] = rows
    else:
        part[numbers // page, numbers % page] = rows


def _layer_of(buffer: torch.Tensor, layout: str, layer: int) -> torch.Tensor:
    """Return one layer of a component as a view, `[s, h, d]` or `[p, t, h, d]`."""
    axes = _AXES[layout]
    part = buffer.select(axes.index("l"), layer)
    left = axes.replace("l", "")
    wanted = "shd" if "s" in left else "pthd"
    return part.permute([left.index(axis) for axis in wanted])


def _backup_mha(self: Any, device_pool: Any, host: torch.Tensor, device: torch.Tensor, *_: Any) -> None:  # noqa: ANN401
    for layer in range(self.layer_num):
        for buffer, rows in ((self.k_buffer, device_pool.k_buffer), (self.v_buffer, device_pool.v_buffer)):
            _set_rows(buffer, self.layout, layer, host, page=self.page_size, rows=rows[layer][device])


def _load_mha(
    self: Any,  # noqa: ANN401
    device_pool: Any,  # noqa: ANN401
    host: torch.Tensor,
    device: torch.Tensor,
    layer: int,
    *_: Any,  # noqa: ANN401
    **__: Any,  # noqa: ANN401
) -> None:
    for buffer, rows in ((self.k_buffer, device_pool.k_buffer), (self.v_buffer, device_pool.v_buffer)):
        rows[layer][device] = rows_of(buffer, self.layout, layer, host, self.page_size)


def _backup_mla(self: Any, device_pool: Any, host: torch.Tensor, device: torch.Tensor, *_: Any) -> None:  # noqa: ANN401
    for layer in range(self.layer_num):
        rows = device_pool.kv_buffer[layer][device]
        _set_rows(self.kv_buffer, self.layout, layer, host, page=self.page_size, rows=rows)


def _load_mla(
    self: Any,  # noqa: ANN401
    device_pool: Any,  # noqa: ANN401
    host: torch.Tensor,
    device: torch.Tensor,
    layer: int,
    *_: Any,  # noqa: ANN401
    **__: Any,  # noqa: ANN401
) -> None:
    rows = rows_of(self.kv_buffer, self.layout, layer, host, self.page_size)
    device_pool.kv_buffer[layer][device] = rows


def _ranks(rank: int, size: int) -> dict[str, int]:
    return {
        "tp_rank": rank,
        "tp_size": size,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_tp_rank": rank,
        "attn_tp_size": size,
        "attn_dp_size": 1,
        "moe_tp_size": size,
        "attn_cp_size": 1,
        "attn_dcp_rank": 0,
        "attn_dcp_size": 1,
    }


class ServerContext:
    """What a server's process has set up before it makes caches: arguments, ranks, process groups.

    Parameters
    ----------
    address : str
        Where the ranks meet: a `file://` of a file that is not there yet.
    rank, size : int
        Tensor parallel.
    arguments
        Server arguments that differ from their defaults.
    """

    def __init__(self, address: str, rank: int = 0, size: int = 1, **arguments: Any) -> None:  # noqa: ANN401
        prepare()
        from sglang.srt.runtime_context import get_context, get_parallel

        self.rank, self.size = rank, size
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
        self.group = torch.distributed.new_group(list(range(size)), backend="gloo")
        self._stack = ExitStack()
        self._stack.enter_context(get_context().override_server_args(**arguments))
        self._stack.enter_context(get_parallel().override(**_ranks(rank, size)))

    def close(self) -> None:
        """Restore what was there before."""
        self._stack.close()
