// Products of whole matrices by AMX, for gradients of weights and for heads of models that train: bfloat16 in, sums in fp32.
//
// The second factor is packed into panels, so much of it as stays in the caches of all cores; rows of the first are laid out as tiles, so many as
// stay in one core's. Each output is one sum in the same order whatever the number of threads.
#include "matrix_parts.h"

#include <algorithm>
#include <vector>

#include "pool.h"

using namespace matrix;

namespace {

#if defined(FW_AMX)

constexpr long INNER = 2048;        // what is summed over before sums go to c
constexpr long PACKED = 4 << 20;    // bytes of panels that are there at once, about
constexpr long NEAR = 1 << 20;      // bytes of rows that stay in a core's cache
constexpr long PAST = 16 << 20;     // bytes of results beyond which these go past the caches

// 32 sums into a row of c.
inline void put(const float* sums, float* c, long count, bool add, bool past) {
    const __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + 16);
    if (past && count == SIDE) return _mm512_stream_ps(c, low), _mm512_stream_ps(c + 16, high);
    const __mmask16 first_of = first(count) & 0xffff, last_of = first(count) >> 16;
    _mm512_mask_storeu_ps(c, first_of, add ? _mm512_maskz_loadu_ps(first_of, c) + low : low);
    _mm512_mask_storeu_ps(c + 16, last_of, add ? _mm512_maskz_loadu_ps(last_of, c + 16) + high : high);
}

inline void put(const float* sums, uint16_t* c, long count, bool add, bool past) {
    Lane low = loaded(sums), high = loaded(sums + 16);
    if (add) {
        alignas(64) uint16_t there[SIDE];
        _mm512_store_si512(there, halves(c, count));
        low += loaded(there), high += loaded(there + 16);
    }
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    if (past && count == SIDE) return _mm512_stream_si512((__m512i*)c, both);
    _mm512_mask_storeu_epi16(c, first(count), both);
}

// Rows of c from one on, and so many columns, by panels that are packed.
template <typename C>
void rows_of(const Product& p, long row, long rows, long column, long count, long from, long inner, const char* panels) {
    thread_local Kept<char> room;
    const long steps = steps_of(inner), bytes = steps * STEP_BYTES;
    const bool add = p.add || from;
    const bool lines = (uintptr_t(p.c) | p.c_step * sizeof(C)) % 64 == 0;
    const bool past = lines && !add && from + inner == p.inner && p.rows * p.columns * long(sizeof(C)) > PAST;
    char* const a = room.of((rows + SIDE - 1) / SIDE * bytes);
    tiled(p, row, rows, from, inner, a);
    amx::Tiles tiles;
    for (long begin = 0; begin < count; begin += WIDTH) {
        const long here = std::min(WIDTH, count - begin);
        const Group group(panels + begin / SIDE * bytes, bytes, (here + SIDE - 1) / SIDE);
        const Group next(panels + (begin + WIDTH) / SIDE * bytes, bytes, begin + WIDTH < count ? GROUP : 0);
        C* const c = (C*)p.c + row * p.c_step + column + begin;
        all_rows(a, rows, steps, group, next, [&](long r, const float* sums) {
            for (long g = 0; g < group.count; g++)
                put(sums + g * SUMS, c + r * p.c_step + g * SIDE, std::min(SIDE, here - g * SIDE), add, past);
        });
    }
    if (past) _mm_sfence();
}

template <typename B, typename C>
void computed(const Product& p) {
    thread_local Kept<char> room;
    const long parts = (p.inner + INNER - 1) / INNER, most = (p.inner + SIDE * parts - 1) / (SIDE * parts) * SIDE;
    const long together = std::max(WIDTH, PACKED / (2 * most) / WIDTH * WIDTH), threads = pool::threads();
    char* const panels = room.of((std::min(together, p.columns) + WIDTH) * most * 2);
    for (long column = 0; column < p.columns; column += together)
        for (long from = 0; from < p.inner; from += most) {
            const long count = std::min(together, p.columns - column), inner = std::min(most, p.inner - from), bytes = steps_of(inner) * STEP_BYTES;
            const long groups = (count + WIDTH - 1) / WIDTH;
            pool::each(groups, [&](long g) {
                pack<B>(p, column + g * WIDTH, std::min(WIDTH, count - g * WIDTH), from, inner, panels + g * GROUP * bytes);
            });
            const long near = std::max(SIDE, NEAR / (2 * inner) / SIDE * SIDE), fair = ((p.rows + threads - 1) / threads + SIDE - 1) / SIDE * SIDE;
            const long block = std::min(near, fair), blocks = (p.rows + block - 1) / block;
            const long shares = std::min(groups, std::max<long>(1, threads / blocks));
            pool::each(blocks * shares, [&](long task) {
                const long row = task / shares * block, begin = groups * (task % shares) / shares, end = groups * (task % shares + 1) / shares;
                const long columns = std::min(count, end * WIDTH) - begin * WIDTH;
                rows_of<C>(p, row, std::min(block, p.rows - row), column + begin * WIDTH, columns, from, inner, panels + begin * GROUP * bytes);
            });
        }
}

#endif

}  // namespace

// Whether there is AMX.
extern "C" long fw_products_are_there() {
#if defined(FW_AMX)
    return amx::here;
#else
    return 0;
#endif
}

// a in bfloat16, b and c in bfloat16 where half, else in fp32. Sums go to c after INNER each, so it had better be fp32 where there are more.
extern "C" void fw_product(const Product* p) {
#if defined(FW_AMX)
    if (p->b_half)
        p->c_half ? computed<uint16_t, uint16_t>(*p) : computed<uint16_t, float>(*p);
    else
        p->c_half ? computed<float, uint16_t>(*p) : computed<float, float>(*p);
#endif
}
