// Checks page numbers on the device, so that a wrong one is refused before anything is copied.
//
// `seen` holds one bit for each destination page and `refused` one word, both zero before the launch.
// Afterwards `refused` is 0, or 1 + the kind of fault: 0 source out of range, 1 destination out of range,
// 2 destination repeated; `refused[1]` is the position of one such page number.

typedef unsigned int u32;
typedef long long i64;

extern "C" __global__ void check_pages(
    const SOURCE_INDEX* source_pages, const DESTINATION_INDEX* destination_pages, u32 num_pages,
    i64 source_limit, i64 destination_limit, u32* seen, u32* refused)
{
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < num_pages; i += gridDim.x * blockDim.x) {
        const i64 from = source_pages[i], to = destination_pages[i];
        u32 fault = 0;
        if (from < 0 || from >= source_limit) fault = 1;
        else if (to < 0 || to >= destination_limit) fault = 2;
        else if (atomicOr(&seen[to / 32], 1u << (to % 32)) & (1u << (to % 32))) fault = 3;
        if (fault && atomicCAS(&refused[0], 0u, fault) == 0u) refused[1] = i;
    }
}
