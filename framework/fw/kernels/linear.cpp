// y = x Wᵀ + b for few rows, where reading W is what takes time, and for many, where the products are.
//
// W [N, K] lies in panels of 32 rows of W: [N/32, K/2, 32, 2], so that a step over K reads 128 bytes one behind another, and each lane of a
// register has two neighbours in K. Each output is one sum over K in the same order whatever the number of rows: a row's result does not
// depend on its company.
#include <immintrin.h>

#include <algorithm>

#include "bf16.h"
#include "pool.h"

namespace {

constexpr int PANEL = 32;
constexpr long PIECE = 1 << 17;  // bytes of weights that a thread takes at once

#if defined(__AVX512BF16__)

inline __m512bh pairs(const uint16_t* at) { return (__m512bh)_mm512_loadu_si512(at); }

inline __m512bh repeated(const uint16_t* at) {
    int32_t pair;
    std::memcpy(&pair, at, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}

template <int ROWS>
void tile(const uint16_t* x, long x_stride, const uint16_t* panel, const float* bias, uint16_t* y, long y_stride, long k2, int columns) {
    __m512 low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; r++) low[r] = high[r] = _mm512_setzero_ps();
    for (long k = 0; k < k2; k++) {
        const uint16_t* w = panel + k * PANEL * 2;
        _mm_prefetch((const char*)(w + 16 * PANEL * 2), _MM_HINT_T0);
        _mm_prefetch((const char*)(w + 16 * PANEL * 2 + PANEL), _MM_HINT_T0);
        __m512bh first = pairs(w), second = pairs(w + PANEL);
        for (int r = 0; r < ROWS; r++) {
            __m512bh of = repeated(x + r * x_stride + 2 * k);
            low[r] = _mm512_dpbf16_ps(low[r], first, of);
            high[r] = _mm512_dpbf16_ps(high[r], second, of);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        alignas(64) float sums[PANEL];
        _mm512_store_ps(sums, low[r]);
        _mm512_store_ps(sums + 16, high[r]);
        for (int n = 0; n < columns; n++) put(y + r * y_stride + n, sums[n] + (bias ? bias[n] : 0.0f));
    }
}
constexpr int MOST = 12;

#else

template <int ROWS>
void tile(const uint16_t* x, long x_stride, const uint16_t* panel, const float* bias, uint16_t* y, long y_stride, long k2, int columns) {
    float sums[ROWS][PANEL] = {};
    for (long k = 0; k < k2; k++) {
        const uint16_t* w = panel + k * PANEL * 2;
        float first[PANEL], second[PANEL];
        for (int n = 0; n < PANEL; n++) first[n] = from_bf16(w[2 * n]), second[n] = from_bf16(w[2 * n + 1]);
        for (int r = 0; r < ROWS; r++) {
            float even = from_bf16(x[r * x_stride + 2 * k]), odd = from_bf16(x[r * x_stride + 2 * k + 1]);
            for (int n = 0; n < PANEL; n++) sums[r][n] += even * first[n] + odd * second[n];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int n = 0; n < columns; n++) put(y + r * y_stride + n, sums[r][n] + (bias ? bias[n] : 0.0f));
}
constexpr int MOST = 4;

#endif

template <int ROWS>
void rows_left(int rows, const uint16_t* x, long xs, const uint16_t* panel, const float* bias, uint16_t* y, long ys, long k2, int columns) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            tile<ROWS>(x, xs, panel, bias, y, ys, k2, columns);
        else
            rows_left<ROWS - 1>(rows, x, xs, panel, bias, y, ys, k2, columns);
    }
}

}  // namespace

// x [rows, inputs] bf16, packed as above, bias [outputs] fp32 or null, y [rows, outputs] bf16; inputs even.
extern "C" void fw_linear_bf16(const uint16_t* x, const uint16_t* packed, const float* bias, uint16_t* y, long rows, long inputs,
                               long outputs) {
    const long k2 = inputs / 2, panels = (outputs + PANEL - 1) / PANEL;
    const long together = std::max<long>(1, PIECE / (PANEL * inputs * 2));  // panels
    pool::each((panels + together - 1) / together, [=](long piece) {
        // Rows are taken in tiles of equal size, so many that a panel, which stays in the cache, is used for all of them before the next.
        const long tiles = (rows + MOST - 1) / MOST;
        for (long p = piece * together; p < std::min(panels, (piece + 1) * together); p++) {
            const uint16_t* panel = packed + p * PANEL * inputs;
            const int columns = int(std::min<long>(PANEL, outputs - p * PANEL));
            for (long t = 0; t < tiles; t++) {
                const long from = rows * t / tiles, to = rows * (t + 1) / tiles;
                rows_left<MOST>(int(to - from), x + from * inputs, inputs, panel, bias ? bias + p * PANEL : nullptr,
                                y + from * outputs + p * PANEL, outputs, k2, columns);
            }
        }
    });
}
