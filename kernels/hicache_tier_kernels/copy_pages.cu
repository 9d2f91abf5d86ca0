// Copies pages between host memory and per-layer device tensors, or between a device ring and those tensors.
//
// NVRTC compiles it for one shape; all sizes are macros, so every division below is by a constant:
//   WORD           bytes that a lane moves at once: 16, 8, 4, 2 or 1
//   PIECE, PIECES  bytes of a piece and pieces of a row
//   ROWS           rows of a page
//   RUN, RUNS      bytes contiguous on the near side (a piece, a row, or all rows of a page), and how many
//                  of them a page of one plane has
//   LINES          aligned lines of 128 bytes that a run can touch
//   NEAR_SOURCE    1 where the near side is read, 0 where it is written
//   NEAR_SHIFTED   0 where every run of the near side starts at a line
//   FAR_JOINED     1 where a run is contiguous on the far side too
//   SOURCE_INDEX, DESTINATION_INDEX   type of page numbers
//   INLINE_PAGES   most page numbers that are in the argument itself; 0 where it holds their addresses
//   THREADS, UNROLL                   threads of a block, and independent loads of a lane
//
// The near side is the host (or the ring). Lanes are laid over whole aligned lines of it, whatever rows
// measure: reads over PCIe go by lines, and two requests for one line cost twice. Tests compile this file
// for the CPU too, where a loop stands for the grid.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Side { u64 base; i64 page, row, piece; };
struct Plane { Side source, destination; };
#if INLINE_PAGES
struct Numbers { SOURCE_INDEX source[INLINE_PAGES]; DESTINATION_INDEX destination[INLINE_PAGES]; };
#else
struct Numbers { const SOURCE_INDEX* __restrict__ source; const DESTINATION_INDEX* __restrict__ destination; };
#endif

#define LINE 128
#define LANES (LINE / WORD)
#define GROUPS (THREADS / LANES)

template <int N> struct Word;
template <> struct Word<16> { uint4 v; };
template <> struct Word<8> { uint2 v; };
template <> struct Word<4> { u32 v; };
template <> struct Word<2> { unsigned short v; };
template <> struct Word<1> { unsigned char v; };

#ifdef __CUDACC_RTC__
// No byte is read twice, and none is written that this kernel reads: loads may bypass coherence and L1.
__device__ __forceinline__ void read(Word<16>& w, u64 p) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w.v.x), "=r"(w.v.y), "=r"(w.v.z), "=r"(w.v.w) : "l"(p));
}
__device__ __forceinline__ void read(Word<8>& w, u64 p) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(w.v.x), "=r"(w.v.y) : "l"(p));
}
__device__ __forceinline__ void read(Word<4>& w, u64 p) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(w.v) : "l"(p));
}
__device__ __forceinline__ void write(const Word<16>& w, u64 p) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};"
                 :: "l"(p), "r"(w.v.x), "r"(w.v.y), "r"(w.v.z), "r"(w.v.w) : "memory");
}
#endif
template <int N> __device__ __forceinline__ void read(Word<N>& w, u64 p) { w = *(const Word<N>*)p; }
template <int N> __device__ __forceinline__ void write(const Word<N>& w, u64 p) { *(Word<N>*)p = w; }

// Where byte `at` of run number `run` of a page lies on one side.
__device__ __forceinline__ u64 address(const Side& side, i64 page, u32 run, u32 at, bool joined) {
    u64 start = side.base + (u64)(page * side.page);
    u32 byte = run * RUN + at;  // within the page of one plane
    if (joined) {
        u32 first = run * RUN;
        return start + (first / (PIECE * PIECES)) * side.row + (first / PIECE % PIECES) * side.piece + at;
    }
    return start + (byte / (PIECE * PIECES)) * side.row + (byte / PIECE % PIECES) * side.piece + byte % PIECE;
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_pages(
    const Plane* __restrict__ planes, const u32* __restrict__ refused,
    u32 first_plane, u32 span, u32 stride, u32 num_planes,
    u32 first_page, u32 num_pages, const __grid_constant__ Numbers numbers)
{
    if (refused && *refused) return;  // the index check before us found a page that is not there
    const u32 lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const u64 lines = (u64)num_pages * RUNS * LINES;
    const u64 tiles = (lines + GROUPS * UNROLL - 1) / (GROUPS * UNROLL);
    for (u64 tile = blockIdx.x; tile < tiles * num_planes; tile += gridDim.x) {
        const u32 number = (u32)(tile / tiles);
        const Plane plane = planes[first_plane + number / span * stride + number % span];
        const u64 first_line = (tile - number * tiles) * (GROUPS * UNROLL) + group;
        Word<WORD> words[UNROLL];
        u64 targets[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const u64 line = first_line + i * GROUPS;
            const u64 global_run = line / LINES;
            const u64 slot = global_run / RUNS;
            const u32 run = (u32)(global_run % RUNS);
            targets[i] = 0;
            if (slot >= num_pages) continue;
            const i64 from = numbers.source[first_page + slot], to = numbers.destination[first_page + slot];
            i64 at = (i64)(line % LINES) * LINE + lane * WORD;
            if (NEAR_SHIFTED) {
                const Side& near = NEAR_SOURCE ? plane.source : plane.destination;
                at -= (i64)(address(near, NEAR_SOURCE ? from : to, run, 0, true) % LINE);
            }
            if (at < 0 || at >= RUN) continue;
            targets[i] = address(plane.destination, to, run, (u32)at, !NEAR_SOURCE || FAR_JOINED);
            read(words[i], address(plane.source, from, run, (u32)at, NEAR_SOURCE || FAR_JOINED));
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i)
            if (targets[i]) write(words[i], targets[i]);
    }
}
