"""The kernel's own source, compiled for the CPU: a loop stands for the grid, the arithmetic is the same."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import hicache_tier_kernels
from hicache_tier.testing.transfer import CopyEngineSuite
from hicache_tier_kernels.cuda import Grid, copy_macros, spans
from hicache_tier_kernels.nvrtc import compile_cubin, compiler
from hicache_tier_kernels.shapes import plane_groups, plane_table

SOURCES = Path(hicache_tier_kernels.__file__).parent
COMPILER = shutil.which("c++")
SHIM = """
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __restrict__
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
static Index threadIdx, blockIdx, gridDim;
#include "copy_pages.cu"
extern "C" void grid(unsigned blocks, const Plane* planes, u32 first, u32 span, u32 stride, u32 count,
                     const SOURCE_INDEX* from, const DESTINATION_INDEX* to, u32 pages, const u32* refused) {
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            copy_pages(planes, first, span, stride, count, from, to, pages, refused);
}
"""
C_INT64 = torch.int64


@cache
def built(folder, macros):
    name = f"{abs(hash(macros))}"
    source, library = folder / f"{name}.cc", folder / f"{name}.so"
    source.write_text(SHIM)
    flags = [f"-D{key}={value}" for key, value in macros]
    command = [COMPILER, "-O0", "-w", "-std=c++17", "-shared", "-fPIC", f"-I{SOURCES}", *flags]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def run_on_cpu(folder, plan, near, *, blocks=3, refused=None):
    far = plan.destination if near is plan.source else plan.source
    table = plane_table(plan.source, plan.destination)
    indices = [np.ascontiguousarray(pages.numpy()) for pages in (plan.source_pages, plan.destination_pages)]
    for group in plane_groups(near, far):
        macros = copy_macros(
            group.shape,
            Grid(1, 128, 3),
            plan.source_pages.dtype,
            plan.destination_pages.dtype,
            near_source=near is plan.source,
        )
        library = built(folder, tuple(macros.items()))
        for span in spans(tuple(sorted(group.planes))):
            library.grid(
                blocks,
                ctypes.c_void_p(table.ctypes.data),
                *span,
                *(ctypes.c_void_p(index.ctypes.data) for index in indices),
                len(indices[0]),
                None if refused is None else ctypes.c_void_p(refused.ctypes.data),
            )


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
class OnCpu(CopyEngineSuite):
    near = "source"

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path_factory):
        type(self).folder = tmp_path_factory.getbasetemp()

    def run(self, plan):
        run_on_cpu(self.folder, plan, getattr(plan, self.near))


class TestLanesOverTheSource(OnCpu):
    pass


class TestLanesOverTheDestination(OnCpu):
    near = "destination"


@pytest.mark.parametrize(
    ("planes", "expected"),
    [
        ([], []),
        ([3], [(3, 1, 1, 1)]),
        ([1, 33], [(1, 1, 32, 2)]),
        (range(1, 64, 32), [(1, 1, 32, 2)]),
        (range(6), [(0, 6, 6, 6)]),
        ([4, 5, 36, 37], [(4, 2, 32, 4)]),
        ([0, 1, 3], [(0, 1, 1, 1), (1, 1, 1, 1), (3, 1, 1, 1)]),
        ([0, 1, 3, 5], [(0, 1, 1, 1), (1, 1, 1, 1), (3, 1, 1, 1), (5, 1, 1, 1)]),
    ],
)
def test_spans(planes, expected):
    assert spans(tuple(planes)) == expected


@pytest.mark.skipif(not compiler(), reason=compiler().reason or "NVRTC is there")
@pytest.mark.parametrize("word", [16, 8, 4, 2, 1])
def test_the_sources_compile(word, tmp_path):
    macros = {
        "WORD": word,
        "PIECE": 48,
        "PIECES": 2,
        "ROWS": 4,
        "RUN": 96,
        "RUNS": 4,
        "LINES": 2,
        "NEAR_SOURCE": 1,
        "NEAR_SHIFTED": 1,
        "FAR_JOINED": 0,
        "SOURCE_INDEX": "int",
        "DESTINATION_INDEX": "long long",
        "THREADS": 1024,
        "UNROLL": 8,
    }
    assert compile_cubin("copy_pages.cu", macros, "sm_90", tmp_path)
    assert compile_cubin("check_pages.cu", macros, "sm_90", tmp_path)
