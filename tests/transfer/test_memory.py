from __future__ import annotations

import logging
import math

import pytest
import torch

from hicache_tier.errors import EngineUnavailableError, InvalidArgumentError, MemoryBudgetError
from hicache_tier.memory import HostMemory, MemoryLimit, check_budget, memory_limits
from hicache_tier.pinning import CHUNK_NBYTES, chunks_of

GIB = 1 << 30
FIVE = chunks_of(0, 5 * 4096, 1, 4096)


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal: 99 kB\nMemAvailable:   8388608 kB\n"
V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = (
    "30 23 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "31 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def tightest(root):
    return min(memory_limits(root), key=lambda limit: limit.available)


def test_host_alone(tmp_path):
    write(tmp_path, {"proc/meminfo": MEMINFO})
    assert memory_limits(tmp_path) == (MemoryLimit("the host (MemAvailable)", 8 * GIB),)


def test_nothing_to_read_is_no_limit(tmp_path):
    assert memory_limits(tmp_path) == ()
    check_budget(1 << 60, ())


def test_cgroup_v2_all_levels_and_reclaimable_cache(tmp_path):
    group = "sys/fs/cgroup/slice/pod"
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/mountinfo": V2_MOUNT,
            "proc/self/cgroup": "0::/slice/pod\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": "5\n",
            "sys/fs/cgroup/slice/memory.max": str(4 * GIB),
            "sys/fs/cgroup/slice/memory.current": str(3 * GIB),
            "sys/fs/cgroup/slice/memory.stat": f"anon 7\ninactive_file {GIB}\nactive_file {GIB}\nshmem 9\n",
        },
    )
    limit = tightest(tmp_path)
    assert limit.available == 3 * GIB
    assert "cgroup v2 limit of 4 GiB" in limit.name
    assert "slice/memory.max" in limit.name


def test_cgroup_v1_with_no_limit_inside_a_limit(tmp_path):
    top = "sys/fs/cgroup/memory"
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/mountinfo": V1_MOUNT,
            "proc/self/cgroup": "4:memory:/a/b\n1:cpu,cpuacct:/\n0::/\n",
            f"{top}/a/b/memory.limit_in_bytes": "9223372036854771712\n",
            f"{top}/a/b/memory.usage_in_bytes": "1\n",
            f"{top}/a/memory.limit_in_bytes": str(2 * GIB),
            f"{top}/a/memory.usage_in_bytes": str(GIB),
            f"{top}/a/memory.stat": "inactive_file 5\ntotal_inactive_file 0\ntotal_active_file 1024\n",
        },
    )
    limit = tightest(tmp_path)
    assert limit.available == GIB + 1024
    assert "cgroup v1" in limit.name


@pytest.mark.parametrize("path", ["/", "/../..", "/kubepods/pod1/c1"])
def test_cgroup_namespaces(tmp_path, path):
    # Within a container the mount point itself is the container's group, whatever the path says.
    write(
        tmp_path,
        {
            "proc/self/mountinfo": V2_MOUNT.replace(" / /sys", " /kubepods/pod1/c1 /sys"),
            "proc/self/cgroup": f"0::{path}\n",
            "sys/fs/cgroup/memory.max": str(GIB),
            "sys/fs/cgroup/memory.current": "0",
        },
    )
    assert [limit.available for limit in memory_limits(tmp_path)] == [GIB]


def test_this_machine_has_limits():
    assert any(limit.name.startswith("the host") for limit in memory_limits())


def test_budget_error_names_needed_available_and_limit():
    limits = [MemoryLimit("the host (MemAvailable)", 8 * GIB), MemoryLimit("the cgroup", 2 * GIB)]
    check_budget(2 * GIB, limits)
    with pytest.raises(MemoryBudgetError, match=r"needs 3 GiB and the cgroup leaves 2 GiB") as caught:
        check_budget(3 * GIB, limits)
    assert isinstance(caught.value, MemoryError)
    with pytest.raises(MemoryBudgetError, match="leaves 0 bytes"):
        check_budget(1, [MemoryLimit("x", -5)])


class Registrar:
    """Pretends to be a driver; fails at one call."""

    def __init__(self, fail_at=None, why=None):
        self.fail_at, self.why = fail_at, why
        self.registered, self.log, self.cleared = {}, [], 0

    def unavailable(self):
        return self.why

    def register(self, address, nbytes):
        self.log.append((address, nbytes))
        if len(self.log) == self.fail_at:
            raise RuntimeError("CUDA error 2: out of memory")
        self.registered[address] = nbytes

    def unregister(self, address):
        del self.registered[address]

    def clear_error(self):
        self.cleared += 1


@pytest.mark.parametrize("pinned", [True, "auto"])
def test_registered_in_bounded_chunks(pinned):
    registrar = Registrar()
    memory = HostMemory(5 * 4096 - 100, pinned, registrar, chunks_of(0, 5 * 4096, 1, 2 * 4096))
    assert memory.pinned
    assert [nbytes for _, nbytes in registrar.log] == [8192, 8192, 4096]
    assert [address - memory.address for address, _ in registrar.log] == [0, 8192, 16384]
    assert memory.release()
    assert registrar.registered == {}
    assert memory.release()


def test_unregistered_when_dropped():
    registrar = Registrar()
    memory = HostMemory(4096, pinned=True, registrar=registrar)
    assert registrar.registered
    del memory
    assert registrar.registered == {}


def test_failure_at_chunk_3_of_5_is_rolled_back():
    registrar = Registrar(fail_at=3)
    with pytest.raises(
        EngineUnavailableError, match=r"chunk 3 of 5 \(4 KiB\) failed: CUDA error 2: out of memory"
    ):
        HostMemory(5 * 4096, True, registrar, FIVE)
    assert len(registrar.log) == 3
    assert registrar.registered == {}
    assert registrar.cleared == 1


def test_auto_falls_back_loudly():
    registrar = Registrar(fail_at=3)
    with pytest.warns(RuntimeWarning, match="plain memory|plain, not pinned.*chunk 3 of 5"):
        memory = HostMemory(5 * 4096, "auto", registrar, FIVE)
    assert not memory.pinned
    assert registrar.registered == {}
    memory.bytes.fill_(1)
    assert memory.release()


def test_an_unregister_that_fails_does_not_keep_the_others(caplog):
    registrar = Registrar()
    memory = HostMemory(3 * 4096, True, registrar, FIVE[:3])
    registrar.registered.pop(memory.address + 4096)

    def unregister(address):
        if address not in registrar.registered:
            raise RuntimeError("CUDA error 713")
        del registrar.registered[address]

    registrar.unregister = unregister
    assert memory.release()
    assert registrar.registered == {}
    assert registrar.cleared == 1
    assert "CUDA error 713" in caplog.text


def test_no_device(caplog):
    caplog.set_level(logging.INFO)
    registrar = Registrar(why="no CUDA device")
    memory = HostMemory(4096, pinned="auto", registrar=registrar)
    assert not memory.pinned
    assert [r.getMessage() for r in caplog.records] == ["host memory is plain, not pinned: no CUDA device"]
    assert not registrar.log
    with pytest.raises(EngineUnavailableError, match="no CUDA device"):
        HostMemory(4096, pinned=True, registrar=registrar)


def test_pinned_false_asks_nobody(caplog):
    caplog.set_level(logging.INFO)
    registrar = Registrar(why="must not be asked")
    HostMemory(4096, pinned=False, registrar=registrar)
    assert not caplog.records


@pytest.mark.parametrize("pinned", ["yes", None, 2])
def test_wrong_pinned(pinned):
    with pytest.raises(InvalidArgumentError, match="Allowed: 'auto', True, False"):
        HostMemory(4096, pinned)


def test_more_than_the_address_space():
    with pytest.raises(MemoryBudgetError, match="refused to map"):
        HostMemory(1 << 60, pinned=False)


def test_views_keep_the_mapping():
    memory = HostMemory(4096, pinned=False)
    view = memory.bytes[10:20]
    view.fill_(7)
    assert not memory.release()
    assert torch.equal(view, torch.full((10,), 7, dtype=torch.uint8))
    del view
    assert memory.release()


@pytest.mark.parametrize("unit", [1, 528, 4096, 6144, 8052, 1 << 20])
@pytest.mark.parametrize("most", [1, 4096, 1 << 20])
def test_seams_lie_between_units(unit, most):
    start, nbytes = 3 * 4096, 4096 * 5000
    chunks = chunks_of(start, nbytes, unit, most)
    assert [at for at, _ in chunks] == [start, *(at + size for at, size in chunks[:-1])]
    assert sum(size for _, size in chunks) == nbytes
    for at, size in chunks:
        assert at % 4096 == size % 4096 == 0
        assert (at - start) % unit == 0
        assert size <= max(most, math.lcm(unit, 4096))


def test_512_gib_are_never_registered_in_one_call():
    """A driver takes seconds for so much, or refuses; what it is asked for at once is bounded."""
    total, unit = 512 * GIB, 9 * 64 * 576
    chunks = chunks_of(0, total - total % (unit * 4096), unit, CHUNK_NBYTES)
    assert max(nbytes for _, nbytes in chunks) <= CHUNK_NBYTES <= 8 * GIB
    ends = [at + nbytes for at, nbytes in chunks]
    assert [at for at, _ in chunks] == [0, *ends[:-1]]
    assert ends[-1] == total - total % (unit * 4096)
