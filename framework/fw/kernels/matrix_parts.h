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

#if defined(FW_AMX)

constexpr long SIDE = amx::ROWS;                          // rows and columns that are multiplied at once, and what is summed over in a step
constexpr long STEP_BYTES = SIDE * SIDE * 2;                // of so many rows, or of a panel
constexpr long GROUP = 4, WIDTH = GROUP * SIDE;           // panels that are packed and multiplied together, and their columns

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

// Rows of a, and of what is summed over so many from one on: [rows/32, steps, 32, 32].
inline void tiled(const Product& p, long row, long rows, long from, long inner, char* to) {
    const long steps = steps_of(inner);
    const uint16_t* a = (const uint16_t*)p.a;
    if (p.a_turned) {
        for (long s = 0; s < steps; s++)
            for (long r = 0; r < rows; r += SIDE)
                turn_square(a + (from + s * SIDE) * p.a_step + row + r, p.a_step, inner - s * SIDE, rows - r, to + (r / SIDE * steps + s) * STEP_BYTES);
        return;
    }
    const long whole = (rows + SIDE - 1) / SIDE * SIDE;
    for (long r = 0; r < whole; r++) {
        const uint16_t* line = a + (row + r) * p.a_step + from;
        char* place = to + r / SIDE * steps * STEP_BYTES + r % SIDE * amx::TILE_BYTES;
        for (long s = 0; s < steps; s++)
            _mm512_storeu_si512(place + s * STEP_BYTES, halves(line + s * SIDE, r < rows ? inner - s * SIDE : 0));
    }
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

#endif

}  // namespace matrix
