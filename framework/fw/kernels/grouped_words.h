// Codes in groups on processors that multiply no bfloat16.
#pragma once
#include <vector>

#include "panels.h"
#include "words.h"

#if defined(FW_WORDS)

namespace grouped {

using namespace panels;

// Numbers of the k-th pair of inputs, of all outputs of a panel, which may come in another order: put_in_order() of what is made of them.
struct Bytes {
    const int8_t* at;
    void pair(long k, __m256* first, __m256* second) const {
        _mm_prefetch((const char*)(at + (k + 16) * PANEL * 2), _MM_HINT_T0);
        for (int q = 0; q < 4; q++) words::apart(at + (k * PANEL + 8 * q) * 2, first[q], second[q]);
    }
    static void put_in_order(__m256*) {}
};

struct Nibbles {
    const uint8_t* at;
    __m256i low, high;  // bytes of what codes stand for, twice
    Nibbles(const uint8_t* codes, const uint16_t* of_code) : at(codes) {
        uint8_t bytes[2][16];
        for (int code = 0; code < 16; code++) bytes[0][code] = uint8_t(of_code[code]), bytes[1][code] = uint8_t(of_code[code] >> 8);
        low = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes[0]));
        high = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes[1]));
    }
    // Of outputs 0 … 3 and 16 … 19, then 4 … 7 and 20 … 23, and so on.
    void numbers(__m256i codes, __m256* to) const {
        const __m256i of_low = _mm256_shuffle_epi8(low, codes), of_high = _mm256_shuffle_epi8(high, codes), none = _mm256_setzero_si256();
        const __m256i begin = _mm256_unpacklo_epi8(of_low, of_high), end = _mm256_unpackhi_epi8(of_low, of_high);
        to[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(none, begin));
        to[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, begin));
        to[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(none, end));
        to[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, end));
    }
    void pair(long k, __m256* first, __m256* second) const {
        _mm_prefetch((const char*)(at + (k + 32) * PANEL), _MM_HINT_T0);
        const __m256i both = _mm256_loadu_si256((const __m256i*)(at + k * PANEL)), code = _mm256_set1_epi8(15);
        numbers(_mm256_and_si256(both, code), first);
        numbers(_mm256_and_si256(_mm256_srli_epi16(both, 4), code), second);
    }
    static void put_in_order(__m256* of) {
        const __m256 a = of[0], b = of[1], c = of[2], d = of[3];
        of[0] = _mm256_permute2f128_ps(a, b, 0x20), of[1] = _mm256_permute2f128_ps(c, d, 0x20);
        of[2] = _mm256_permute2f128_ps(a, b, 0x31), of[3] = _mm256_permute2f128_ps(c, d, 0x31);
    }
};

// Sums of a row over a group, added to those of the groups before.
inline void collect(const __m256* found, const float* scale, const float* offset, const float* of_x, float* sums) {
    for (int q = 0; q < 4; q++) {
        __m256 sum = _mm256_fmadd_ps(found[q], _mm256_loadu_ps(scale + 8 * q), _mm256_loadu_ps(sums + 8 * q));
        if (offset) sum = _mm256_fmadd_ps(_mm256_loadu_ps(offset + 8 * q), _mm256_set1_ps(*of_x), sum);
        _mm256_storeu_ps(sums + 8 * q, sum);
    }
}

template <int ROWS, typename W>
void tile(const uint16_t* x, long x_stride, const W& w, const float* scale, const float* offset, const float* of_x, const float* bias,
          uint16_t* y, long y_stride, long groups, long pairs, int columns) {
    alignas(64) float sums[ROWS][PANEL] = {};
    for (long g = 0; g < groups; g++) {
        __m256 found[ROWS][4];
        for (int r = 0; r < ROWS; r++)
            for (int q = 0; q < 4; q++) found[r][q] = _mm256_setzero_ps();
        for (long k = g * pairs; k < (g + 1) * pairs; k++) {
            __m256 first[4], second[4];
            w.pair(k, first, second);
            for (int r = 0; r < ROWS; r++) {
                const __m256 even = _mm256_set1_ps(from_bf16(x[r * x_stride + 2 * k]));
                const __m256 odd = _mm256_set1_ps(from_bf16(x[r * x_stride + 2 * k + 1]));
                for (int q = 0; q < 4; q++) found[r][q] = _mm256_fmadd_ps(even, first[q], found[r][q]);
                for (int q = 0; q < 4; q++) found[r][q] = _mm256_fmadd_ps(odd, second[q], found[r][q]);
            }
        }
        for (int r = 0; r < ROWS; r++) {
            W::put_in_order(found[r]);
            collect(found[r], scale + g * PANEL, offset ? offset + g * PANEL : nullptr, offset ? of_x + r * groups + g : nullptr, sums[r]);
        }
    }
    for (int r = 0; r < ROWS; r++) finish(loaded(sums[r]), loaded(sums[r] + LANES), nullptr, bias, y + r * y_stride, columns);
}

// Rows that are there in fp32: what codes stand for is made so once for all of them.
template <typename W>
void by_numbers(const words::Rows& x, const W& w, const float* scale, const float* offset, const float* of_x, const float* bias, uint16_t* y,
                long rows, long inputs, long outputs, long group, int columns) {
    thread_local std::vector<float> both;
    both.assign(2 * rows * PANEL, 0.0f);
    float *const sums = both.data(), *const found = sums + rows * PANEL;
    for (long g = 0; g < inputs / group; g++) {
        std::fill_n(found, rows * PANEL, 0.0f);
        words::add_all<words::Numbers>(x, g * group, (g + 1) * group, found, [&](long k, __m256* first, __m256* second) {
            w.pair(k / 2, first, second);
            W::put_in_order(first), W::put_in_order(second);
        });
        for (long r = 0; r < rows; r++) {
            const float* of = found + r * PANEL;
            const __m256 all[4] = {_mm256_loadu_ps(of), _mm256_loadu_ps(of + 8), _mm256_loadu_ps(of + 16), _mm256_loadu_ps(of + 24)};
            collect(all, scale + g * PANEL, offset ? offset + g * PANEL : nullptr,
                    offset ? of_x + r * (inputs / group) + g : nullptr, sums + r * PANEL);
        }
    }
    for (long r = 0; r < rows; r++)
        finish(loaded(sums + r * PANEL), loaded(sums + r * PANEL + LANES), nullptr, bias, y + r * outputs, columns);
}

}  // namespace grouped

#endif
