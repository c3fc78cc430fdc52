// Attention to blocks in bfloat16 by products of pairs: a query's neighbours by those of sixteen keys, two positions' weights by their values.
// Weights are rounded to bfloat16, as what values are multiplied by (as in FlashAttention, Dao et al. 2022). Sums are taken in fp32, in the same
// order whatever is computed together.
#pragma once
#include <algorithm>
#include <cstring>

#include "attention.h"
#include "pairs.h"

namespace attention {

#if defined(__AVX512BF16__)

constexpr long PAIRED = 2 * LANES;            // numbers of bfloat16 in a register, positions whose values are computed at once
constexpr long SQUARE = LANES * PAIRED;       // numbers in sixteen registers
constexpr int AT_ONCE = 8, OF_VALUES = 4;     // rows whose sums stay in registers, over 32 keys and over so many registers of values

inline bool takes(const Call& c) { return c.half && c.s.dim % PAIRED == 0; }

inline const uint16_t* query_of(const Call& c, const Tile& tile, long row) {
    const long groups = c.s.groups();
    return (const uint16_t*)c.q + ((tile.token + row / groups) * c.s.heads + tile.head * groups + row % groups) * c.s.dim;
}

// So many numbers of bfloat16 that are kept for a thread, where a register's bytes begin.
inline uint16_t* room_for(long numbers, Work& work) {
    work.in_pairs.resize(PAIRED + numbers);
    return (uint16_t*)(((uintptr_t)work.in_pairs.data() + 63) / 64 * 64);
}

// Scores of all rows become weights in bfloat16, [rows, CHUNK]; zeros up to `padded`.
inline void round_weights(const Tile& tile, long begin, long count, long padded, const Shape& s, Work& work, uint16_t* weights, float* found) {
    const long groups = s.groups();
    for (long r = 0; r < tile.count * groups; r++) {
        const long position = tile.position + r / groups;
        float* of = work.scores.data() + r * CHUNK;
        weights_of(of, begin, count, s.first_of(position), position, s, found + r * s.partial());
        std::fill_n(of + count, padded - count, 0.0f);
        for (long t = 0; t < padded; t += PAIRED)
            _mm512_store_si512(weights + r * CHUNK + t, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(of + t + LANES), _mm512_loadu_ps(of + t)));
    }
}

// 32 numbers of two neighbours' values in pairs, in the order in which registers are unpacked.
struct Unpacked {
    Unpacked(const uint8_t* first_row, const uint8_t* second_row) {
        const __m512i of_first = _mm512_loadu_si512(first_row), of_second = _mm512_loadu_si512(second_row);
        first = _mm512_unpacklo_epi16(of_first, of_second), second = _mm512_unpackhi_epi16(of_first, of_second);
    }
    __m512i first, second;
};

// Values of 32 positions in pairs: [dim/16, 16, 16, 2].
inline void values_in_pairs(const uint8_t* const* rows, long dim, uint16_t* to) {
    for (long pair = 0; pair < LANES; pair++)
        for (long h = 0; h < dim; h += PAIRED) {
            const Unpacked both(rows[2 * pair] + 2 * h, rows[2 * pair + 1] + 2 * h);
            uint16_t* at = to + h / LANES * SQUARE + pair * PAIRED;
            _mm512_store_si512(at, both.first);
            _mm512_store_si512(at + SQUARE, both.second);
        }
}

// Sums of 32 numbers back in their order.
inline void in_order(__m512& low, __m512& high) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    const __m512 before = low;
    low = _mm512_permutex2var_ps(before, first, high);
    high = _mm512_permutex2var_ps(before, second, high);
}

// Scores of rows [ROWS, dim] and 32 keys, [dim/2, 32, 2].
template <int ROWS>
inline void score_pairs(const uint16_t* rows, const uint16_t* keys, long dim, float scale, float* to) {
    __m512 low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; r++) low[r] = high[r] = _mm512_setzero_ps();
    for (long h = 0; h < dim; h += 2) {
        const __m512bh first = pairs(keys + h * PAIRED), second = pairs(keys + h * PAIRED + PAIRED);
        for (int r = 0; r < ROWS; r++) {
            const __m512bh of = repeated(rows + r * dim + h);
            low[r] = _mm512_dpbf16_ps(low[r], first, of);
            high[r] = _mm512_dpbf16_ps(high[r], second, of);
        }
    }
    const __m512 by = _mm512_set1_ps(scale);
    for (int r = 0; r < ROWS; r++) {
        _mm512_storeu_ps(to + r * CHUNK, _mm512_mul_ps(low[r], by));
        _mm512_storeu_ps(to + r * CHUNK + LANES, _mm512_mul_ps(high[r], by));
    }
}

// What rows get of N registers of values, of all pairs of positions that each_pair(f) calls f(position, the registers) for.
template <int ROWS, int N, typename F>
inline void weigh_pairs(const uint16_t* weights, F&& each_pair, float* to, long step) {
    __m512 sums[ROWS][N];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < N; i++) sums[r][i] = _mm512_setzero_ps();
    each_pair([&](long position, const __m512i* value) __attribute__((always_inline)) {
        for (int r = 0; r < ROWS; r++) {
            const __m512bh of = repeated(weights + r * CHUNK + position);
            for (int i = 0; i < N; i++) sums[r][i] = _mm512_dpbf16_ps(sums[r][i], (__m512bh)value[i], of);
        }
    });
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < N; i += 2) {
            in_order(sums[r][i], sums[r][i + 1]);
            _mm512_storeu_ps(to + r * step + i * LANES, sums[r][i]);
            _mm512_storeu_ps(to + r * step + (i + 1) * LANES, sums[r][i + 1]);
        }
}

// As attend_chunk of attention.cpp, of rows in bfloat16.
inline void attend_chunk_by_pairs(const Call& c, const Tile& tile, long begin, Work& work, float* found, const Tile* next, long next_begin) {
    const Shape& s = c.s;
    const long rows = tile.count * s.groups(), dim = s.dim, partial = s.partial();
    const long count = std::min<long>(CHUNK, tile.last() + 1 - begin), padded = (count + PAIRED - 1) / PAIRED * PAIRED;
    work.scores.resize(rows * CHUNK);
    work.zeros.resize(s.row_bytes);
    uint16_t* const queries = room_for(rows * dim + PAIRED * dim + rows * CHUNK + CHUNK * dim, work);
    uint16_t *const keys = queries + rows * dim, *const weights = keys + PAIRED * dim, *const values = weights + rows * CHUNK;

    Stream stream;
    name_rows(c, tile, begin, count, PAIRED, work.zeros.data(), next, next_begin, stream);
    const uint8_t **key = stream.row, **value = key + stream.padded;
    for (long r = 0; r < rows; r++) std::memcpy(queries + r * dim, query_of(c, tile, r), dim * sizeof(uint16_t));
    stream.fetch(0, std::min<long>(AHEAD, stream.padded));
    const long some = LANES / std::min<long>(LANES, dim / PAIRED);  // rows that are fetched with each square
    for (long from = 0; from < count; from += PAIRED) {
        if (unseen(s, tile, begin + from, PAIRED)) {  // masked below
            stream.fetch(from + AHEAD, PAIRED);
            for (long r = 0; r < rows; r++) std::fill_n(work.scores.data() + r * CHUNK + from, PAIRED, 0.0f);
            continue;
        }
        for (long half = 0; half < 2; half++)
            for (long h = 0; h < dim; h += PAIRED) {
                __m512i square[LANES];
                for (long t = 0; t < LANES; t++) square[t] = _mm512_loadu_si512(key[from + half * LANES + t] + 2 * h);
                turn(square);
                for (long i = 0; i < LANES; i++) _mm512_store_si512(keys + (h + 2 * i) * PAIRED + half * PAIRED, square[i]);
                if (const long at = h / PAIRED * some; at < LANES) stream.fetch(from + AHEAD + half * LANES + at, some);
            }
        tiled<AT_ONCE>(rows, [&](long r, auto known) {
            score_pairs<known>(queries + r * dim, keys, dim, s.scale, work.scores.data() + r * CHUNK + from);
        });
    }
    round_weights(tile, begin, count, padded, s, work, weights, found);
    const bool as_kept = rows <= WEIGHED;  // each value is read once
    for (long from = 0; from < padded && !as_kept; from += PAIRED) {
        stream.fetch(stream.padded + from + AHEAD, PAIRED);
        if (!unseen(s, tile, begin + from, PAIRED)) values_in_pairs(value + from, dim, values + from * dim);
    }
    tiled<WEIGHED>(rows, [&](long r, auto known) {
        auto of = [&](long h, auto together) {
            constexpr int N = together;
            auto each_pair = [&](auto&& f) __attribute__((always_inline)) {
                for (long from = 0; from < padded; from += PAIRED) {
                    if (unseen(s, tile, begin + from, PAIRED)) {
                        if (as_kept && h == 0) stream.fetch(stream.padded + from + AHEAD, PAIRED);
                        continue;
                    }
                    for (long t = from; t < from + PAIRED; t += 2) {
                        __m512i registers[N];
                        if (as_kept) {
                            if (h == 0) stream.fetch(stream.padded + t + AHEAD, 2);
                            for (int i = 0; i < N; i += 2) {
                                const Unpacked both(value[t] + 2 * (h + i * LANES), value[t + 1] + 2 * (h + i * LANES));
                                registers[i] = both.first, registers[i + 1] = both.second;
                            }
                        } else {
                            const uint16_t* at = values + from * dim + h / LANES * SQUARE + (t - from) * LANES;
                            for (int i = 0; i < N; i++) registers[i] = _mm512_load_si512(at + i * SQUARE);
                        }
                        f(t, registers);
                    }
                }
            };
            weigh_pairs<known, N>(weights + r * CHUNK, each_pair, found + r * partial + LANES + h, partial);
        };
        long h = 0;
        for (; h + OF_VALUES * LANES <= dim; h += OF_VALUES * LANES) of(h, std::integral_constant<int, OF_VALUES>{});
        if (h < dim) of(h, std::integral_constant<int, 2>{});
    });
}

#else

inline bool takes(const Call&) { return false; }

#endif

}  // namespace attention
