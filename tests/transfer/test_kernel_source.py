"""The kernel's own source, compiled for the CPU: a loop stands for the grid, the arithmetic is the same."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hicache_tier_kernels
from hicache_tier.testing.transfer import CopyEngineSuite
from hicache_tier_kernels.cuda import Grid, copy_macros, spans
from hicache_tier_kernels.indices import INLINE_PAGES, NumbersInline
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
#define __grid_constant__
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Index { unsigned x; };
static Index threadIdx, blockIdx, gridDim;
#include "copy_pages.cu"
extern "C" void grid(unsigned blocks, const Plane* planes, u32 first, u32 span, u32 stride, u32 count,
                     const Numbers* numbers, u32 start, u32 pages, const u32* refused) {
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            copy_pages(planes, refused, first, span, stride, count, start, pages, *numbers);
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


def run_on_cpu(folder, plan, near, *, blocks=3, refused=None, inline=False):
    far = plan.destination if near is plan.source else plan.source
    table = plane_table(plan.source, plan.destination)
    indices = [np.ascontiguousarray(numbers) for numbers in plan.numbers]
    types = (torch.int32,) * 2 if inline else (plan.source_pages.dtype, plan.destination_pages.dtype)
    if inline:
        numbers = NumbersInline(*indices)
    else:
        argument = (ctypes.c_void_p * 2)(*(index.ctypes.data for index in indices))
        numbers = SimpleNamespace(argument=argument, address=ctypes.addressof(argument))
    half = len(indices[0]) // 2  # in two calls, so that the first page counts
    for group in plane_groups(near, far):
        macros = copy_macros(
            group.shape,
            Grid(1, 128, 3),
            *types,
            INLINE_PAGES if inline else 0,
            near_source=near is plan.source,
        )
        library = built(folder, tuple(macros.items()))
        for span in spans(tuple(sorted(group.planes))):
            for start, count in ((0, half), (half, len(indices[0]) - half)):
                library.grid(
                    blocks,
                    ctypes.c_void_p(table.ctypes.data),
                    *span,
                    ctypes.c_void_p(numbers.address),
                    start,
                    count,
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
    def run(self, plan):
        run_on_cpu(self.folder, plan, plan.source, inline=plan.source_pages.dtype == torch.int32)


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
        "INLINE_PAGES": 256 * (word > 2),
        "THREADS": 1024,
        "UNROLL": 8,
    }
    assert compile_cubin("copy_pages.cu", macros, "sm_90", tmp_path)
    assert compile_cubin("check_pages.cu", macros, "sm_90", tmp_path)
