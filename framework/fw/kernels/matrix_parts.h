// Factors of a product as tiles of AMX read them: rows in pairs of tiles, columns in panels of 32, all filled up with zeros to whole tiles.
#pragma once
#include <algorithm>
#include <vector>

#include "amx.h"
#include "lanes.h"

namespace matrix {

// c [rows, columns] (+)= a [rows, inner] · b [inner, columns]. Steps are numbers from row to row of what is in memory, which is [inner, rows] where
// a is turned, [columns, inner] where b is.
struct Product {
    const void *a, *b;
    void* c;
    long a_step, b_step, c_step, rows, columns, inner, a_turned, b_turned, b_half, c_half, add;
};

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

#if defined(FW_AMX)

constexpr long SIDE = amx::ROWS;                 // rows and columns that are multiplied at once, and what is summed over in a step
constexpr long STEP_BYTES = SIDE * SIDE * 2;     // of so many rows, or of a panel
constexpr long GROUP = 4, WIDTH = GROUP * SIDE;  // panels that are packed and multiplied together, and their columns

inline long steps_of(long inner) { return (inner + SIDE - 1) / SIDE; }
inline __mmask32 first(long count) { return count >= SIDE ? ~0u : count <= 0 ? 0 : (1u << count) - 1; }

inline __m512i halves(const uint16_t* at, long count) { return _mm512_maskz_loadu_epi16(first(count), at); }

inline __m512i halves(const float* at, long count) {
    const __mmask32 some = first(count);
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(some >> 16, at + 16), _mm512_maskz_loadu_ps(some & 0xffff, at));
}

// A square of which rows lie `step` apart, turned: two tiles.
inline void turn_square(const uint16_t* from, long step, long rows, long columns, char* to) {
    __m512i low[16], high[16];
    for (long p = 0; p < 16; p++) {
        const __m512i even = halves(from + 2 * p * step, 2 * p < rows ? columns : 0);
        const __m512i odd = halves(from + (2 * p + 1) * step, 2 * p + 1 < rows ? columns : 0);
        low[p] = _mm512_unpacklo_epi16(even, odd);  // of four columns of each eight
        high[p] = _mm512_unpackhi_epi16(even, odd);
    }
    turn(low);
    turn(high);
    for (long w = 0; w < 16; w++) {
        char* row = to + (w / 4 * 8 + w % 4) * amx::TILE_BYTES;
        _mm512_storeu_si512(row, low[w]);
        _mm512_storeu_si512(row + 4 * amx::TILE_BYTES, high[w]);
    }
}

// Rows `step` apart as tiles, [rows/32, steps, 32, 32].
inline void tiled(const uint16_t* from, long step, long rows, long inner, char* to) {
    const long steps = steps_of(inner), whole = (rows + SIDE - 1) / SIDE * SIDE;
    for (long r = 0; r < whole; r++) {
        const uint16_t* line = from + r * step;
        char* place = to + r / SIDE * steps * STEP_BYTES + r % SIDE * amx::TILE_BYTES;
        for (long s = 0; s < steps; s++)
            _mm512_storeu_si512(place + s * STEP_BYTES, halves(line + s * SIDE, r < rows ? inner - s * SIDE : 0));
    }
}

// The same of rows of a, and of what is summed over so many from one on.
inline void tiled(const Product& p, long row, long rows, long from, long inner, char* to) {
    const long steps = steps_of(inner);
    const uint16_t* a = (const uint16_t*)p.a;
    if (!p.a_turned) return tiled(a + row * p.a_step + from, p.a_step, rows, inner, to);
    for (long s = 0; s < steps; s++)
        for (long r = 0; r < rows; r += SIDE)
            turn_square(a + (from + s * SIDE) * p.a_step + row + r, p.a_step, inner - s * SIDE, rows - r, to + (r / SIDE * steps + s) * STEP_BYTES);
}

// Columns of b, up to WIDTH, and of what is summed over so many from one on: panels [columns/32, steps, 16, 32, 2].
template <typename B>
void pack(const Product& p, long column, long count, long from, long inner, char* to) {
    const B* b = (const B*)p.b;
    const long steps = steps_of(inner), bytes = steps * STEP_BYTES;
    for (long begin = 0; begin < count; begin += SIDE, to += bytes) {
        const long here = std::min(SIDE, count - begin);
        if (p.b_turned) {
            const B* first_row = b + (column + begin) * p.b_step + from;
            for (long s = 0; s < steps; s++)
                for (long half = 0; half < 2; half++) {
                    __m512i square[16];
                    for (long n = 0; n < 16; n++) {
                        const long which = half * 16 + n;
                        square[n] = halves(first_row + which * p.b_step + s * SIDE, which < here ? inner - s * SIDE : 0);
                    }
                    turn(square);
                    for (long w = 0; w < 16; w++) _mm512_storeu_si512(to + s * STEP_BYTES + w * amx::PANEL_BYTES + half * 64, square[w]);
                }
            continue;
        }
        const __m512i apart = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);  // so that what unpacking takes from each quarter lies side by side
        for (long k = 0; k < steps * SIDE; k += 2) {
            const B* row = b + (from + k) * p.b_step + column + begin;
            const __m512i even = _mm512_permutexvar_epi64(apart, halves(row, k < inner ? here : 0));
            const __m512i odd = _mm512_permutexvar_epi64(apart, halves(row + p.b_step, k + 1 < inner ? here : 0));
            _mm512_storeu_si512(to + k / 2 * amx::PANEL_BYTES, _mm512_unpacklo_epi16(even, odd));
            _mm512_storeu_si512(to + k / 2 * amx::PANEL_BYTES + 64, _mm512_unpackhi_epi16(even, odd));
        }
    }
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

inline void multiplied(const char* a, const char* panel, long steps, float* sums, bool add) {
    multiplied(a, panel, steps, sums, add, [](long) {});
}

constexpr long DEEP = 16;           // steps of a panel that stay in the nearest cache
constexpr long SUMS = SIDE * SIDE;  // of a block of rows and a panel

// Panels that are multiplied together.
struct Group {
    const char* at[GROUP] = {};
    long count = 0;

    Group() = default;
    Group(const char* first, long bytes, long count) : count(count) {
        for (long g = 0; g < count; g++) at[g] = first + g * bytes;
    }
};

// put(row, its sums, of each panel SUMS after those of the one before) of all rows, which lie as tiles: a block's go out while the next is
// multiplied, and `next`, the group that comes then, is fetched. This thread's tiles are as Tiles makes them.
template <typename F>
void all_rows(const char* a, long rows, long steps, const Group& group, const Group& next, F&& put) {
    thread_local Kept<float> room;
    const long blocks = (rows + SIDE - 1) / SIDE, bytes = steps * STEP_BYTES;
    const bool once = steps <= DEEP;
    float* const sums = room.of((once ? 2 : blocks) * GROUP * SUMS);
    auto of_block = [&](long b) { return sums + (once ? b & 1 : b) * GROUP * SUMS; };
    auto put_row = [&](long r) { put(r, of_block(r / SIDE) + r % SIDE * SIDE); };
    long told = 0;  // rows
    for (long s = 0; s < steps; s += DEEP) {
        const long some = std::min(DEEP, steps - s), all = group.count * some, each = (SIDE + all - 1) / all, pause = std::max<long>(1, all / SIDE);
        for (long b = 0; b < blocks; b++) {
            const long upto = s + DEEP >= steps ? b * SIDE : 0, first_line = b * SIDE / blocks, end_line = (b + 1) * SIDE / blocks;
            for (long g = 0; g < group.count; g++) {
                const char* const coming = next.at[g] ? next.at[g] + s * STEP_BYTES : nullptr;
                multiplied(a + b * bytes + s * STEP_BYTES, group.at[g] + s * STEP_BYTES, some, of_block(b) + g * SUMS, s > 0, [&](long k) {
                    if (told < upto && (g * some + k) % pause == 0)
                        for (long i = 0; i < each && told < upto; i++) put_row(told++);
                    if (coming)
                        for (long i = first_line; i < end_line; i++) _mm_prefetch(coming + k * STEP_BYTES + i * 64, _MM_HINT_T1);
                });
            }
            while (told < upto) put_row(told++);
        }
    }
    while (told < rows) put_row(told++);
}

#endif

}  // namespace matrix
