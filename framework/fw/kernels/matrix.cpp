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
constexpr long DEEP = 16;           // steps that stay in the nearest cache
constexpr long PAST = 16 << 20;     // bytes of results beyond which these go past the caches
constexpr long SUMS = SIDE * SIDE;  // of a block of rows and a panel

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

// sums [32, 32] (+)= 32 rows of so many steps times a panel's.
template <typename F>
inline void multiplied(const char* a, const char* panel, long steps, float* sums, bool add, F&& between) {
    constexpr long ROW = SIDE * sizeof(float), SECOND = amx::SIDE * amx::TILE_BYTES;
    char* c = (char*)sums;
    amx::settle();
    if (add) {
        _tile_loadd(0, c, ROW);
        _tile_loadd(1, c + 64, ROW);
        _tile_loadd(2, c + 16 * ROW, ROW);
        _tile_loadd(3, c + 16 * ROW + 64, ROW);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (long s = 0; s < steps; s++, a += STEP_BYTES, panel += STEP_BYTES) {
        between(s);
        _tile_loadd(6, panel, amx::PANEL_BYTES);
        _tile_loadd(4, a, amx::TILE_BYTES);
        _tile_loadd(7, panel + 64, amx::PANEL_BYTES);
        _tile_loadd(5, a + SECOND, amx::TILE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, ROW);
    _tile_stored(1, c + 64, ROW);
    _tile_stored(2, c + 16 * ROW, ROW);
    _tile_stored(3, c + 16 * ROW + 64, ROW);
    amx::settle();
}

// `size` numbers of this thread's own, where lines of the cache begin.
template <typename T>
class Kept {
public:
    T* of(size_t size) {
        room.resize(size + 64 / sizeof(T));
        return (T*)((uintptr_t(room.data()) + 63) / 64 * 64);
    }

private:
    std::vector<T> room;
};

// Rows of c from one on, and so many columns, by panels that are packed: results of a block of rows go out while the next is multiplied, and the
// group of panels that comes then is fetched.
template <typename C>
void rows_of(const Product& p, long row, long rows, long column, long count, long from, long inner, const char* panels) {
    thread_local Kept<char> tiles_room;
    thread_local Kept<float> sums_room;
    const long steps = steps_of(inner), blocks = (rows + SIDE - 1) / SIDE, bytes = steps * STEP_BYTES;
    const bool once = steps <= DEEP, add = p.add || from;
    const bool past = !add && from + inner == p.inner && p.rows * p.columns * long(sizeof(C)) > PAST && (uintptr_t(p.c) | p.c_step * sizeof(C)) % 64 == 0;
    char* const a = tiles_room.of(blocks * bytes);
    float* const sums = sums_room.of((once ? 2 : blocks) * GROUP * SUMS);
    auto of_block = [&](long b) { return sums + (once ? b & 1 : b) * GROUP * SUMS; };
    tiled(p, row, rows, from, inner, a);
    amx::Tiles tiles;
    for (long begin = 0; begin < count; begin += WIDTH) {
        const long here = std::min(WIDTH, count - begin), wide = (here + SIDE - 1) / SIDE;
        const char* const group = panels + begin / SIDE * bytes;
        const char* const next = begin + WIDTH < count ? group + GROUP * bytes : nullptr;
        C* const c = (C*)p.c + row * p.c_step + column + begin;
        auto put_row = [&](long r) {
            const float* of = of_block(r / SIDE) + r % SIDE * SIDE;
            for (long g = 0; g < wide; g++) put(of + g * SUMS, c + r * p.c_step + g * SIDE, std::min(SIDE, here - g * SIDE), add, past);
        };
        long told = 0;  // rows of c
        for (long s = 0; s < steps; s += DEEP) {
            const long some = std::min(DEEP, steps - s), each = (SIDE + wide * some - 1) / (wide * some), pause = std::max<long>(1, wide * some / SIDE);
            for (long b = 0; b < blocks; b++) {
                const long upto = s + DEEP >= steps ? b * SIDE : 0, first_line = b * SIDE / blocks, end_line = (b + 1) * SIDE / blocks;
                for (long g = 0; g < wide; g++)
                    multiplied(a + b * bytes + s * STEP_BYTES, group + g * bytes + s * STEP_BYTES, some, of_block(b) + g * SUMS, s > 0, [&](long k) {
                        if (told < upto && (g * some + k) % pause == 0)
                            for (long i = 0; i < each && told < upto; i++) put_row(told++);
                        if (next)
                            for (long i = first_line; i < end_line; i++) _mm_prefetch(next + g * bytes + (s + k) * STEP_BYTES + i * 64, _MM_HINT_T1);
                    });
                while (told < upto) put_row(told++);
            }
        }
        while (told < rows) put_row(told++);
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
            pool::each(groups, [&](long g) { pack<B>(p, column + g * WIDTH, std::min(WIDTH, count - g * WIDTH), from, inner, panels + g * GROUP * bytes); });
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
