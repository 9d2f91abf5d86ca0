from __future__ import annotations

import logging
import mmap
import platform
from types import SimpleNamespace

import pytest
import torch

from hicache_tier.memory import HostMemory
from hicache_tier.placement import device_node, prefer_node, use_huge_pages

SIZE = 4 << 20


@pytest.fixture
def mapping():
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as found:
        yield found


def machine(root, *, huge=None, online=None, node=None):
    for path, text in {
        "sys/kernel/mm/transparent_hugepage/enabled": huge,
        "sys/devices/system/node/online": online,
        "sys/bus/pci/devices/0000:0a:00.0/numa_node": node,
    }.items():
        if text is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("huge", "reason"),
    [(None, "this kernel has no"), ("always madvise [never]", "says never")],
)
def test_no_huge_pages(tmp_path, mapping, huge, reason):
    found = use_huge_pages(mapping, machine(tmp_path, huge=huge))
    assert not found
    assert reason in found.reason


def test_huge_pages_are_asked_for(tmp_path, mapping):
    found = use_huge_pages(mapping, machine(tmp_path, huge="always [madvise] never"))
    assert found or "no huge pages" in found.reason  # a kernel may refuse the advice


def test_one_node_needs_no_choice(tmp_path):
    assert prefer_node(0, 0, None, machine(tmp_path, online="0")).reason == "one memory node"


def test_an_unknown_node_is_said(tmp_path):
    found = prefer_node(0, 0, None, machine(tmp_path, online="0-1"))
    assert not found
    assert "does not tell" in found.reason


def test_a_range_that_is_not_ours_is_a_reason(tmp_path):
    found = prefer_node(0x1000, 4096, 0, machine(tmp_path, online="0-1"))
    assert not found
    assert "any memory node" in found.reason


def test_another_processor_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "riscv64" in prefer_node(0, 0, 0, machine(tmp_path, online="0-1")).reason


@pytest.mark.parametrize(("text", "expected"), [("1", 1), ("-1", None), (None, None), ("x", None)])
def test_the_node_of_a_device(tmp_path, monkeypatch, text, expected):
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=10, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert device_node(0, machine(tmp_path, node=text)) == expected


def test_a_device_that_does_not_tell_its_place(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace())
    assert device_node(0) is None


def test_memory_is_placed_before_it_is_pinned(caplog):
    class Registrar:
        def unavailable(self):
            return None

        def register(self, address, nbytes):
            assert "host memory at" in caplog.text

        def unregister(self, address):
            pass

        def clear_error(self):
            pass

    with caplog.at_level(logging.INFO, logger="hicache_tier.memory"):
        memory = HostMemory(SIZE, True, Registrar())
    assert memory.pinned
    memory.release()
