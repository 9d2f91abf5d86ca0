"""Checksums on the device are those of `xxhash`, bit by bit.

The arithmetic is shown twice without a device: the decomposition in NumPy, and the kernels' own source
compiled for the CPU, where a loop stands for the grid.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

import hicache_tier_kernels
from hicache_tier.errors import InvalidArgumentError
from hicache_tier_kernels.checksum import LEAST_NBYTES, PageChecksums, PageShape, checksum_support, finish
from hicache_tier_kernels.nvrtc import compile_cubin, compiler

SOURCES = Path(hicache_tier_kernels.__file__).parent
COMPILER = shutil.which("c++")
SHIM = """
#define __device__
#define __global__
#define __constant__ static const
#define __forceinline__ inline
#define __restrict__
typedef unsigned long long word;
struct ulonglong2 { word x, y; };
struct Index { unsigned x; };
static Index threadIdx, blockIdx, gridDim, blockDim;
static word __umul64hi(word a, word b) { return (unsigned __int128)a * b >> 64; }
static void atomicAdd(word* sum, word value) { *sum += value; }
#include "checksum.cu"
template <class F> static void grid(u32 blocks, u32 threads, F kernel) {
    gridDim.x = blocks, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel();
}
extern "C" void run(const u64* fragments, const u64* seeds, u32 pages, u32 a_page, u32 a_fragment, u32 blocks,
                    u64 nbytes, ulonglong2* sums, u64* results) {
    grid(3, 64, [&] { block_sums(fragments, seeds, pages, a_page, a_fragment, blocks, sums); });
    grid((4 * pages + 31) / 32, 32,
         [&] { page_sums(fragments, seeds, pages, a_page, blocks, nbytes, sums, results); });
}
"""
LENGTHS = [*range(LEAST_NBYTES, 330, 3), 1023, 1024, 1025, 1088, 1089, 2047, 2048, 2049, 4096, 4097, 16383]
LENGTHS += [16384, 16385, 17408, 20480, 65536, 100_001]
FRAGMENTS = [(2, 1024), (3, 2048), (5, 4096), (64, 1024), (2, 65536)]


class Pages:
    """Random pages in memory, whose fragments start at multiples of 16, and their seeds."""

    def __init__(self, count, fragments, nbytes):
        rng = np.random.default_rng(nbytes)
        step = -(-nbytes // 16) * 16 + 16
        raw = rng.integers(0, 256, count * fragments * step + 16, np.uint8)
        skew = -raw.ctypes.data % 16
        self.bytes = raw[skew : skew + count * fragments * step].reshape(count, fragments, step)
        self.nbytes = nbytes
        self.seeds = rng.integers(0, 2**64, count, np.uint64)
        self.seeds[:2] = [0, 2**64 - 1]
        self.shape = PageShape(fragments, nbytes)

    def addresses(self, base):
        """Addresses of fragments, where the bytes lie at `base`."""
        count, fragments, step = self.bytes.shape
        numbers = np.arange(count * fragments, dtype=np.uint64).reshape(count, fragments)
        return np.uint64(base) + numbers * np.uint64(step)

    def expected(self):
        return [
            xxhash.xxh3_64_intdigest(page[:, : self.nbytes].tobytes(), int(seed))
            for page, seed in zip(self.bytes, self.seeds, strict=True)
        ]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("checksum")
    (folder / "shim.cc").write_text(SHIM)
    built = folder / "shim.so"
    flags = ["-O1", "-w", "-std=c++17", "-shared", "-fPIC", f"-I{SOURCES}"]
    subprocess.run([COMPILER, *flags, str(folder / "shim.cc"), "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


def on_cpu(library, pages):
    shape, count = pages.shape, len(pages.seeds)
    sums = np.zeros((count, max(1, shape.blocks), 8), np.uint64)
    results = np.zeros(count, np.uint64)
    addresses = pages.addresses(pages.bytes.ctypes.data)
    at = [ctypes.c_void_p(array.ctypes.data) for array in (addresses, pages.seeds, sums, results)]
    numbers = (count, shape.fragments, shape.blocks_a_fragment, shape.blocks)
    library.run(*at[:2], *numbers, ctypes.c_uint64(shape.fragment_nbytes), *at[2:])
    return finish(results, shape.nbytes).tolist()


def test_the_kernels_source_in_one_run(library):
    for nbytes in LENGTHS:
        pages = Pages(3, 1, nbytes)
        assert on_cpu(library, pages) == pages.expected(), nbytes


@pytest.mark.parametrize(("fragments", "nbytes"), FRAGMENTS)
def test_the_kernels_source_in_fragments(library, fragments, nbytes):
    pages = Pages(3, fragments, nbytes)
    assert on_cpu(library, pages) == pages.expected()


# -- the decomposition ---------------------------------------------------------------------------------


@cache
def secret_words():
    """The secret's 24 words and the eight start values, read from the kernels' source."""
    text = (SOURCES / "checksum.cu").read_text()
    tables = []
    for name in ("SECRET[24]", "START[8]"):
        inside = text.partition(name)[2].partition("{")[2].partition("}")[0]
        words = [int(word.strip().removesuffix("ull"), 16) for word in inside.split(",") if word.strip()]
        tables.append(np.array(words, np.uint64))
    return tables


def decomposed(data, seed):
    """XXH3-64 of more than 240 bytes: sums of all blocks side by side, then a chain over the blocks."""
    words, accumulators = secret_words()
    with np.errstate(over="ignore"):
        secret = words.copy()
        secret[0::2] += np.uint64(seed)
        secret[1::2] -= np.uint64(seed)
        tail = secret.tobytes()

        def keys(byte):
            return np.frombuffer(tail[byte : byte + 64], np.uint64)

        def stripe_sums(stripes, starts):
            mixed = stripes ^ np.stack([keys(start) for start in starts])
            low = np.uint64(0xFFFFFFFF)
            swapped = stripes.reshape(*stripes.shape[:-1], 4, 2)[..., ::-1].reshape(stripes.shape)
            return ((mixed & low) * (mixed >> np.uint64(32)) + swapped).sum(axis=-2, dtype=np.uint64)

        blocks = (len(data) - 1) // 1024
        whole = np.frombuffer(data[: blocks * 1024], np.uint64).reshape(blocks, 16, 8)
        for total in stripe_sums(whole, range(0, 128, 8)):
            accumulators = accumulators + total
            accumulators ^= accumulators >> np.uint64(47)
            accumulators = (accumulators ^ keys(128)) * np.uint64(0x9E3779B1)
        rest = (len(data) - 1 - blocks * 1024) // 64
        if rest:
            part = np.frombuffer(data[blocks * 1024 :][: rest * 64], np.uint64).reshape(rest, 8)
            accumulators = accumulators + stripe_sums(part, range(0, 8 * rest, 8))
        last = np.frombuffer(data[-64:], np.uint64).reshape(1, 8)
        accumulators = (accumulators + stripe_sums(last, [121])) ^ keys(11)
    pairs = [int(word) for word in accumulators]
    total = 0
    for left, right in zip(pairs[0::2], pairs[1::2], strict=True):
        product = left * right
        total += product ^ (product >> 64)
    return int(finish(np.array([total % 2**64], np.uint64), len(data))[0])


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1, 0x9E3779B185EBCA87])
def test_the_decomposition(seed):
    rng = np.random.default_rng(7)
    for nbytes in LENGTHS:
        data = rng.bytes(nbytes)
        assert decomposed(data, seed) == xxhash.xxh3_64_intdigest(data, seed), nbytes


# -- on a device ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fragments", "nbytes"), [(1, 240), (2, 1000), (3, 1025), (1, 0)])
def test_shapes_that_are_refused(fragments, nbytes):
    with pytest.raises(InvalidArgumentError, match=r"241 bytes or more|multiples of 1024"):
        PageShape(fragments, nbytes)


def test_without_a_device_it_says_why():
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    found = checksum_support(0)
    assert not found
    assert found.reason


@pytest.mark.skipif(not compiler(), reason=compiler().reason or "NVRTC is there")
def test_the_source_compiles(tmp_path):
    assert compile_cubin("checksum.cu", {}, "sm_90", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnDevice:
    @pytest.mark.parametrize(("fragments", "nbytes"), [*FRAGMENTS, *((1, n) for n in LENGTHS[::9])])
    def test_any_shape(self, fragments, nbytes):
        assert checksum_support(0), checksum_support(0).reason
        pages = Pages(37, fragments, nbytes)
        device, stream = torch.device("cuda", 0), torch.cuda.Stream()
        there = torch.from_numpy(pages.bytes.reshape(-1).copy()).to(device)
        assert there.data_ptr() % 16 == 0
        torch.cuda.synchronize()
        sums = PageChecksums(device, pages.shape, 40)
        for count in (37, 1, 12, 0):  # the same object again, for fewer pages
            sums.submit(pages.addresses(there.data_ptr())[:count], pages.seeds[:count], stream)
            stream.synchronize()
            assert sums.take(count).tolist() == pages.expected()[:count]
