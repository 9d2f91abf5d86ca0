// XXH3-64 of pages in device memory, seeded, as its specification has it for inputs above 240 bytes.
//
// Within a block of 1024 bytes the sums of its 16 stripes do not depend on each other; between blocks the
// accumulators are scrambled, one block after the other. So `block_sums` adds up every block of every page at
// the speed of memory, and `page_sums` then goes through the blocks of each page, all pages side by side.
// Accumulators 2k and 2k+1 never meet the others before the end: a thread has one such pair.
//
// A page is one run of memory, or several fragments of one length, a multiple of 1024. Addresses are multiples
// of 16. `seeds` has one seed a page. Tests compile this file for the CPU too, where a loop stands for the grid.

typedef unsigned int u32;
typedef unsigned long long u64;

#define BLOCK 1024
#define STRIPE 64
#define AHEAD 16  // blocks whose sums are on their way while the ones before are worked on

__constant__ u64 SECRET[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};
__constant__ u64 START[8] = {
    0xc2b2ae3dull, 0x9e3779b185ebca87ull, 0xc2b2ae3d27d4eb4full, 0x165667b19e3779f9ull,
    0x85ebca77c2b2ae63ull, 0x85ebca77ull, 0x27d4eb2f165667c5ull, 0x9e3779b1ull,
};
#define PRIME32_1 0x9e3779b1ull

struct Pair { u64 x, y; };

// Word `number` of the secret that follows from a seed.
__device__ __forceinline__ u64 secret(u32 number, u64 seed) {
    return SECRET[number] + (number & 1 ? 0 - seed : seed);
}

// Eight bytes of that secret which start within word `number`.
__device__ __forceinline__ u64 secret_at(u32 number, u32 byte, u64 seed) {
    return secret(number, seed) >> (8 * byte) | secret(number + 1, seed) << (64 - 8 * byte);
}

__device__ __forceinline__ u64 product(u64 word) { return (word & 0xffffffffull) * (word >> 32); }

__device__ __forceinline__ void add_stripe(Pair& sum, u64 x, u64 y, u64 first, u64 second) {
    sum.x += product(x ^ first) + y;
    sum.y += product(y ^ second) + x;
}

__device__ __forceinline__ u64 scrambled(u64 sum, u64 key) { return (sum ^ (sum >> 47) ^ key) * PRIME32_1; }

__device__ __forceinline__ void add_block(Pair& sum, const ulonglong2& block, const u64* keys) {
    sum.x = scrambled(sum.x + block.x, keys[0]);
    sum.y = scrambled(sum.y + block.y, keys[1]);
}

__device__ __forceinline__ Pair read(u64 address) {
    const ulonglong2 found = *(const ulonglong2*)address;
    return {found.x, found.y};
}

__device__ __forceinline__ u64 read_unaligned(u64 address) {
    u64 word = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) word |= (u64)((const unsigned char*)address)[i] << (8 * i);
    return word;
}

// `sums`: [pages, blocks, 8], blocks = those that are followed by another.
extern "C" __global__ void block_sums(
    const u64* __restrict__ fragments, const u64* __restrict__ seeds, u32 num_pages, u32 fragments_a_page,
    u32 blocks_a_fragment, u32 blocks, ulonglong2* __restrict__ sums)
{
    const u64 all = (u64)num_pages * blocks * 4;
    for (u64 at = blockIdx.x * (u64)blockDim.x + threadIdx.x; at < all; at += (u64)gridDim.x * blockDim.x) {
        const u32 pair = at % 4;
        const u32 page = (u32)(at / 4 / blocks), block = (u32)(at / 4 % blocks);
        const u64 address = fragments[(u64)page * fragments_a_page + block / blocks_a_fragment]
                          + (u64)(block % blocks_a_fragment) * BLOCK + pair * 16;
        const u64 seed = seeds[page];
        Pair sum = {0, 0};
        u64 first = secret(2 * pair, seed);
#pragma unroll
        for (u32 stripe = 0; stripe < BLOCK / STRIPE; ++stripe) {
            const u64 second = secret(2 * pair + stripe + 1, seed);
            const Pair data = read(address + stripe * STRIPE);
            add_stripe(sum, data.x, data.y, first, second);
            first = second;
        }
        ulonglong2 result;
        result.x = sum.x, result.y = sum.y;
        sums[at] = result;
    }
}

// Adds to each page's word of `results` what its four pairs come to: the checksum before its last mixing.
extern "C" __global__ void page_sums(
    const u64* __restrict__ fragments, const u64* __restrict__ seeds, u32 num_pages, u32 fragments_a_page,
    u32 blocks, u64 fragment_nbytes, const ulonglong2* __restrict__ sums, u64* __restrict__ results)
{
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    const u32 page = at / 4, pair = at % 4;
    if (page >= num_pages) return;
    const u64 seed = seeds[page];
    const u64 keys[2] = {secret(16 + 2 * pair, seed), secret(17 + 2 * pair, seed)};
    Pair sum = {START[2 * pair], START[2 * pair + 1]};
    const ulonglong2* from = sums + (u64)page * blocks * 4 + pair;
    u32 block = 0;
    if (blocks >= AHEAD) {  // without a condition in the chain, whose length is all that counts
        ulonglong2 coming[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; ++i) coming[i] = from[(u64)i * 4];
        for (; block + 2 * AHEAD <= blocks; block += AHEAD) {
#pragma unroll
            for (u32 i = 0; i < AHEAD; ++i) {
                add_block(sum, coming[i], keys);
                coming[i] = from[(u64)(block + i + AHEAD) * 4];
            }
        }
#pragma unroll
        for (u32 i = 0; i < AHEAD; ++i) add_block(sum, coming[i], keys);
        block += AHEAD;
    }
    for (; block < blocks; ++block) add_block(sum, from[(u64)block * 4], keys);
    const u64 last = fragments[(u64)page * fragments_a_page + fragments_a_page - 1];
    const u64 end = last + fragment_nbytes, tail = last + blocks * (u64)BLOCK
                  - (fragments_a_page - 1) * fragment_nbytes;
    const u32 stripes = (u32)((end - tail - 1) / STRIPE);
    for (u32 stripe = 0; stripe < stripes; ++stripe) {
        const Pair data = read(tail + stripe * STRIPE + pair * 16);
        add_stripe(sum, data.x, data.y, secret(2 * pair + stripe, seed), secret(2 * pair + stripe + 1, seed));
    }
    const u64 ends = end - STRIPE + pair * 16;
    add_stripe(sum, read_unaligned(ends), read_unaligned(ends + 8), secret_at(15 + 2 * pair, 1, seed),
               secret_at(16 + 2 * pair, 1, seed));
    const u64 left = sum.x ^ secret_at(1 + 2 * pair, 3, seed);
    const u64 right = sum.y ^ secret_at(2 + 2 * pair, 3, seed);
    atomicAdd(&results[page], (left * right) ^ __umul64hi(left, right));
}
