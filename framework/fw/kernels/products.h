// Products of a few query rows with keys and values, whose sums stay in registers.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "lanes.h"

namespace products {

constexpr int CHUNK = 256, BLOCK = 32;  // positions; a block's keys stay in the nearest cache
// Rows that are asked for ahead: blocks of a cache lie anywhere, so no processor guesses them. What is asked for at once beyond some dozens
// of lines waits, and all that follows it, so it is asked for bit by bit between computing.
constexpr int AHEAD = 2 * BLOCK;
// Rows whose scores are computed at once, and rows and lanes whose values are added up at once: sums stay in registers.
#if defined(__AVX512F__)
constexpr int SCORED = 8, WEIGHED = 4, TOGETHER = 4;
#else
constexpr int SCORED = 2, WEIGHED = 2, TOGETHER = 2;
#endif

template <int S>
inline void exchange(Lane& a, Lane& b) {
    Lane low, high;
    if constexpr (S == 8) {
        low = picked<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(a, b);
        high = picked<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(a, b);
    } else if constexpr (S == 4) {
        low = picked<0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27>(a, b);
        high = picked<4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31>(a, b);
    } else if constexpr (S == 2) {
        low = picked<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(a, b);
        high = picked<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(a, b);
    } else {
        low = picked<0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30>(a, b);
        high = picked<1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31>(a, b);
    }
    a = low, b = high;
}

template <int S>
inline void stage(Lane* rows) {
    for (int i = 0; i < LANES; i++)
        if (!(i & S)) exchange<S>(rows[i], rows[i + S]);
}

inline void transpose(Lane* rows) {
    stage<8>(rows);
    stage<4>(rows);
    stage<2>(rows);
    stage<1>(rows);
}

// Sixteen keys in bfloat16 as columns: of each number of a head those of the sixteen in to[0], to[2], …; calls `between` with
// each number of a register.
template <typename Between>
inline void turn_kept(const uint8_t* const* row, long dim, Lane* to, Between&& between) {
#if defined(__AVX512F__)
    for (long h = 0; h < dim; h += 2 * LANES) {
        __m512i square[LANES];
        for (long t = 0; t < LANES; t++) square[t] = _mm512_loadu_si512(row[t] + 2 * h);
        turn(square);
        for (long i = 0; i < LANES; i++) {
            to[2 * (h + 2 * i)] = (Lane)_mm512_slli_epi32(square[i], 16);
            to[2 * (h + 2 * i + 1)] = (Lane)_mm512_and_si512(square[i], _mm512_set1_epi32(int(0xffff0000)));
        }
        between(h / LANES);
        between(h / LANES + 1);
    }
#endif
}

// f with a number of rows that the compiler knows, for all of them in tiles.
template <int MOST, typename F>
inline void tiled(long rows, F&& f) {
    long r = 0;
    for (; r + MOST <= rows; r += MOST) f(r, std::integral_constant<int, MOST>{});
    if constexpr (MOST > 1) {
        if (r < rows) tiled<MOST / 2>(rows - r, [&](long more, auto known) { f(r + more, known); });
    }
}

// Scores of BLOCK keys: q [rows, dim], keys [dim, BLOCK].
template <int ROWS>
inline void score(const float* q, long stride, const Lane* keys, long dim, float* to) {
    constexpr int WIDE = BLOCK / NATIVE;
    Native sums[ROWS][WIDE] = {};
    for (long h = 0; h < dim; h++) {
        Native key[WIDE];
        for (int i = 0; i < WIDE; i++) key[i] = native((const float*)(keys + 2 * h) + i * NATIVE);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < WIDE; i++) sums[r][i] += q[r * stride + h] * key[i];
    }
    for (int r = 0; r < ROWS; r++) std::memcpy(to + r * CHUNK, sums[r], sizeof sums[r]);
}

// out [rows, stride] += weights [rows, CHUNK] · values [count, of lanes], of N lanes from one on.
template <int ROWS, int N>
inline void weigh(const float* weights, const Lane* values, long lanes, long count, float* out, long stride) {
    constexpr int WIDE = N * LANES / NATIVE;
    Native sums[ROWS][WIDE];
    for (int r = 0; r < ROWS; r++) std::memcpy(sums[r], out + r * stride, sizeof sums[r]);
    for (long t = 0; t < count; t++) {
        Native value[WIDE];
        for (int i = 0; i < WIDE; i++) value[i] = native((const float*)(values + t * lanes) + i * NATIVE);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < WIDE; i++) sums[r][i] += weights[r * CHUNK + t] * value[i];
    }
    for (int r = 0; r < ROWS; r++) std::memcpy(out + r * stride, sums[r], sizeof sums[r]);
}

// Rows of bytes that a part reads, one after another: of its keys and of its values, of whole blocks, and of the first keys of the part
// that this thread has next, most likely. What is not seen, or not there, is a row of zeros.
struct Stream {
    const uint8_t* row[2 * CHUNK + AHEAD];
    long row_bytes, padded;  // positions of whole blocks

    void fetch(long from, long count) const {
        for (long i = from; i < from + count; i++)
            for (long line = 0; line < row_bytes; line += 64) __builtin_prefetch(row[i] + line, 0, 2);  // into the second cache
    }
};

// The same of values as they are kept, in bfloat16, of few rows: each is widened once anyway. Rows that come later are fetched one with each.
template <int ROWS, int N>
inline void weigh_kept(const float* weights, const uint8_t* const* values, const Stream& stream, long coming, long lane, long count,
                       float* out, long stride) {
    constexpr int WIDE = N * LANES / NATIVE;
    Native sums[ROWS][WIDE];
    for (int r = 0; r < ROWS; r++) std::memcpy(sums[r], out + r * stride, sizeof sums[r]);
    for (long t = 0; t < count; t++) {
        stream.fetch(coming + t, 1);
        Lane value[N];
        for (int i = 0; i < N; i++) value[i] = loaded((const uint16_t*)values[t] + (lane + i) * LANES);
        Native parts[WIDE];
        std::memcpy(parts, value, sizeof parts);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < WIDE; i++) sums[r][i] += weights[r * CHUNK + t] * parts[i];
    }
    for (int r = 0; r < ROWS; r++) std::memcpy(out + r * stride, sums[r], sizeof sums[r]);
}

}  // namespace products
