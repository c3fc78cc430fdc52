// y = x Wᵀ + b, W in bfloat16 or in codes of 8 or 4 bits, for few rows, where reading W is what takes time, and for many, where the
// products are.
//
// W [N, K] lies in panels of 32 rows of W: [N/32, K/2, 32, 2], so that a step over K reads 128 bytes one behind another, and each lane of a
// register has two neighbours in K; sixteen of its rows are two tiles of AMX. Each output is one sum over K in the same order whatever the
// number of rows: a row's result does not depend on its company.
#include <algorithm>
#include <climits>
#include <cmath>
#include <vector>

#include "again.h"
#include "amx_rows.h"
#include "panels.h"
#include "words.h"

using namespace panels;

namespace {

constexpr long NEAR = 1 << 20, FEWEST = 128;  // bytes of x that stay in a core's cache beside a panel, and rows at least
constexpr long MANY = 12;                     // rows from which on it pays to make a panel fp32 first
#if defined(FW_WORDS)
constexpr long FEW = LONG_MAX;  // rows for which codes are widened as they are needed, each time
#else
constexpr long FEW = 64;
#endif

#if defined(__AVX512BF16__)

template <int ROWS, typename W>
void tile(const uint16_t* x, long x_stride, const W* panel, const float* scale, const float* bias, uint16_t* y, long y_stride, long k2,
          int columns, const char* ahead) {
    __m512 low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; r++) low[r] = high[r] = _mm512_setzero_ps();
    for (long k = 0; k < k2; k++) {
        const W* w = panel + k * PANEL * 2;
        _mm_prefetch((const char*)(w + 16 * PANEL * 2), _MM_HINT_T0);
        if (sizeof(W) > 1) _mm_prefetch((const char*)(w + 16 * PANEL * 2 + PANEL), _MM_HINT_T0);
        _mm_prefetch(ahead + k * PANEL * sizeof(W), _MM_HINT_T1);
        __m512bh first = pairs(w), second = pairs(w + PANEL);
        for (int r = 0; r < ROWS; r++) {
            __m512bh of = repeated(x + r * x_stride + 2 * k);
            low[r] = _mm512_dpbf16_ps(low[r], first, of);
            high[r] = _mm512_dpbf16_ps(high[r], second, of);
        }
    }
    for (int r = 0; r < ROWS; r++) finish((Lane)low[r], (Lane)high[r], scale, bias, y + r * y_stride, columns);
}

#elif defined(__AVX2__) && defined(__FMA__)

// As many registers of eight columns at a time as leave room for what they are multiplied by; there are sixteen.
template <int ROWS, typename W>
void tile(const uint16_t* x, long x_stride, const W* panel, const float* scale, const float* bias, uint16_t* y, long y_stride, long k2,
          int columns, const char* ahead) {
    constexpr int WIDE = 8, AT_ONCE = ROWS <= 2 ? 4 : 2;
    alignas(64) float sums[ROWS][PANEL];
    for (int begin = 0; begin < PANEL; begin += AT_ONCE * WIDE) {
        __m256 sum[ROWS][AT_ONCE];
        for (int r = 0; r < ROWS; r++)
            for (int q = 0; q < AT_ONCE; q++) sum[r][q] = _mm256_setzero_ps();
        for (long k = 0; k < k2; k++) {
            const W* w = panel + (k * PANEL + begin) * 2;
            for (int ahead = 0; ahead < int(AT_ONCE * WIDE * 2 * sizeof(W)); ahead += 64)
                _mm_prefetch((const char*)(w + 16 * PANEL * 2) + ahead, _MM_HINT_T0);
            __m256 first[AT_ONCE], second[AT_ONCE];
            for (int q = 0; q < AT_ONCE; q++) words::apart(w + q * WIDE * 2, first[q], second[q]);
            for (int r = 0; r < ROWS; r++) {
                int32_t pair;
                std::memcpy(&pair, x + r * x_stride + 2 * k, 4);
                const __m256i of = _mm256_set1_epi32(pair);
                const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(of, 16));
                const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(of, _mm256_set1_epi32(0xffff0000)));
                for (int q = 0; q < AT_ONCE; q++) sum[r][q] = _mm256_fmadd_ps(even, first[q], sum[r][q]);
                for (int q = 0; q < AT_ONCE; q++) sum[r][q] = _mm256_fmadd_ps(odd, second[q], sum[r][q]);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int q = 0; q < AT_ONCE; q++) _mm256_store_ps(sums[r] + begin + q * WIDE, sum[r][q]);
    }
    for (int r = 0; r < ROWS; r++) finish(loaded(sums[r]), loaded(sums[r] + LANES), scale, bias, y + r * y_stride, columns);
}

#else

inline float number(uint16_t bits) { return from_bf16(bits); }
inline float number(int8_t code) { return float(code); }

template <int ROWS, typename W>
void tile(const uint16_t* x, long x_stride, const W* panel, const float* scale, const float* bias, uint16_t* y, long y_stride, long k2,
          int columns, const char* ahead) {
    float sums[ROWS][PANEL] = {};
    for (long k = 0; k < k2; k++) {
        const W* w = panel + k * PANEL * 2;
        float first[PANEL], second[PANEL];
        for (int n = 0; n < PANEL; n++) first[n] = number(w[2 * n]), second[n] = number(w[2 * n + 1]);
        for (int r = 0; r < ROWS; r++) {
            float even = from_bf16(x[r * x_stride + 2 * k]), odd = from_bf16(x[r * x_stride + 2 * k + 1]);
            for (int n = 0; n < PANEL; n++) sums[r][n] += even * first[n] + odd * second[n];
        }
    }
    for (int r = 0; r < ROWS; r++) finish(loaded(sums[r]), loaded(sums[r] + LANES), scale, bias, y + r * y_stride, columns);
}
#endif

template <int ROWS, typename W>
void rows_left(int rows, const uint16_t* x, long xs, const W* panel, const float* scale, const float* bias, uint16_t* y, long ys, long k2,
               int columns, const char* ahead) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            tile<ROWS>(x, xs, panel, scale, bias, y, ys, k2, columns, ahead);
        else
            rows_left<ROWS - 1>(rows, x, xs, panel, scale, bias, y, ys, k2, columns, ahead);
    }
}

#if defined(FW_AMX)
// A panel of codes as bfloat16, sixteen rows at a time.
struct Widened {
    const int8_t* codes;
    amx::Ring& ring;

    void copy(long k, long count, char* to) const { widen(codes + k * PANEL * 2, count * PANEL * 2, (uint16_t*)to); }

    const char* rows(long k) const {
        char* to = ring.next();
        copy(k, amx::SIDE, to);
        amx::settle();
        return to;
    }
};

inline amx::Panel as_tiles(const uint16_t* panel, amx::Ring&) { return {(const char*)panel}; }
inline Widened as_tiles(const int8_t* panel, amx::Ring& ring) { return {panel, ring}; }
#endif

// x as rows of bfloat16 and, where it is used, in fp32.
struct Given {
    Given(const uint16_t* x, long rows, long inputs) : x(x), in_fp32(words::Rows::in_fp32(x, rows, inputs, MANY)) {}
    const uint16_t* x;
    words::Rows in_fp32;
};

// All rows against one panel, in tiles of equal size: the panel, which stays in the cache, is used for all of them before the next. Of
// several tiles the first two fetch the panel that comes next, half of it each, so that memory is never idle.
template <typename W>
void against(const Given& given, const W* panel, const float* scale, const float* bias, uint16_t* y, long rows, long inputs, long outputs,
             int columns, const char* next = nullptr) {
    const uint16_t* x = given.x;
#if defined(FW_AMX)
    if (amx::here) {
        amx::Ring ring;
        amx::all_rows<amx::Of::BF16>(x, inputs * 2, as_tiles(panel, ring), rows, inputs / 2, (const char*)panel, PANEL * inputs * sizeof(W),
                                     next, [&](long r, const float* sums) {
                                         finish(loaded(sums), loaded(sums + LANES), scale, bias, y + r * outputs, columns);
                                     });
        return;
    }
#elif defined(FW_WORDS)
    if (given.in_fp32.there()) {
        thread_local std::vector<float> sums;
        sums.assign(rows * PANEL, 0.0f);
        words::add_all<words::Numbers>(given.in_fp32, 0, inputs, sums.data(), [&](long k, __m256* first, __m256* second) {
            const W* w = panel + k * PANEL;
            for (int line = 0; line < int(PANEL * 2 * sizeof(W)); line += 64) _mm_prefetch((const char*)(w + words::STEPS * PANEL) + line, _MM_HINT_T1);
            for (int q = 0; q < 4; q++) words::apart(w + 16 * q, first[q], second[q]);
        });
        for (long r = 0; r < rows; r++) {
            const float* of = sums.data() + r * PANEL;
            finish(loaded(of), loaded(of + LANES), scale, bias, y + r * outputs, columns);
        }
        return;
    }
#endif
    const long tiles = (rows + MOST - 1) / MOST;
    for (long t = 0; t < tiles; t++) {
        const long from = rows * t / tiles, to = rows * (t + 1) / tiles;
        const char* ahead = next && tiles > 1 && t < 2 ? next + t * (PANEL * inputs * sizeof(W) / 2) : (const char*)panel;
        rows_left<MOST>(int(to - from), x + from * inputs, inputs, panel, scale, bias, y + from * outputs, outputs, inputs / 2, columns,
                        ahead);
    }
}

#if defined(__AVX512BF16__)
// Sixteen times sixteen pairs: to[k] has the k-th pair of each row.
inline void turned(const uint16_t* rows, long step, uint16_t* to, long to_step) {
    __m512i square[16];
    for (int r = 0; r < 16; r++) square[r] = _mm512_loadu_si512(rows + r * step);
    turn(square);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * to_step, square[i]);
}
#endif

// A panel of a weight that lies otherwise.
void panel_of(const uint16_t* w, long output_step, long input_step, int columns, long inputs, uint16_t* to) {
    long done = 0;
#if defined(__AVX512BF16__)
    if (input_step == 1 && columns == PANEL)
        for (; done + 32 <= inputs; done += 32)
            for (int half = 0; half < 2; half++)
                turned(w + half * 16 * output_step + done, output_step, to + done * PANEL + half * 32, PANEL * 2);
#endif
    for (long k = done; k < inputs; k++) {
        uint16_t* pair = to + k / 2 * PANEL * 2 + k % 2;
        for (int n = 0; n < columns; n++) pair[2 * n] = w[n * output_step + k * input_step];
        for (int n = columns; n < PANEL; n++) pair[2 * n] = 0;
    }
}

void linear_bf16(const uint16_t* x, const Layer* layers, long count, long rows, long inputs) {
    const Given given(x, rows, inputs);
    each_panel(layers, count, rows, PANEL * inputs * 2, [&](const Layer& of, long p, int columns, const char* next, uint16_t* y, long step) {
        against(given, (const uint16_t*)of.weight + p * PANEL * inputs, nullptr, of.bias ? of.bias + p * PANEL : nullptr, y, rows, inputs, step,
                columns, next);
    });
}

// As in a file: each thread makes the panel it needs, which stays in its cache.
void linear_plain(const uint16_t* x, const Layer* layers, long count, long rows, long inputs) {
    const Given given(x, rows, inputs);
    each_panel(layers, count, rows, PANEL * inputs * 2, [&](const Layer& of, long p, int columns, const char*, uint16_t* y, long step) {
        thread_local std::vector<uint16_t> panel;
        panel.resize(PANEL * inputs);
        panel_of((const uint16_t*)of.weight + p * PANEL * of.output_step, of.output_step, of.input_step, columns, inputs, panel.data());
        against(given, panel.data(), nullptr, of.bias ? of.bias + p * PANEL : nullptr, y, rows, inputs, step, columns);
    });
}

void linear_w8(const uint16_t* x, const Layer* layers, long count, long rows, long inputs) {
    const Given given(x, rows, inputs);
    each_panel(layers, count, rows, PANEL * inputs, [&](const Layer& of, long p, int columns, const char* next, uint16_t* y, long step) {
        const int8_t* codes = (const int8_t*)of.weight + p * PANEL * inputs;
        const float* bias = of.bias ? of.bias + p * PANEL : nullptr;
        if (rows <= FEW) {
            against(given, codes, of.scale + p * PANEL, bias, y, rows, inputs, step, columns, next);
            return;
        }
        thread_local std::vector<uint16_t> wide;
        wide.resize(PANEL * inputs);
        widen(codes, PANEL * inputs, wide.data());
        against(given, wide.data(), of.scale + p * PANEL, bias, y, rows, inputs, step, columns);
    });
}

}  // namespace

// Layers that read the same x [rows, inputs] in bfloat16; of each y [rows, outputs] in bfloat16, bias [outputs] in fp32. By kind: 0,
// weights in bfloat16, inputs even. 1, codes, a scale for each output, inputs even. 2, codes in panels [outputs/32, ⌈inputs/4⌉, 32, 4], a
// scale and the sum of codes for each output; rows of x become codes, too. 3, weights in bfloat16 in no panels, inputs even: the same
// results as of 0. 4, codes of 4 bits in panels [outputs/32, inputs/2, 32], and 5, of 8 bits; scales and offsets [outputs/32, groups, 32].
extern "C" void fw_linear(long kind, const uint16_t* x, const Layer* layers, long count, long rows, long inputs) {
    constexpr void (*OF[])(const uint16_t*, const Layer*, long, long, long) = {
        linear_bf16, linear_w8, whole::numbers, linear_plain, grouped::four_bits, grouped::eight_bits,
    };
    // As many rows at a time as are still near when the next panel comes, in whole tiles.
    const long together = std::max(FEWEST, NEAR / (inputs * 2) / PANEL * PANEL);
    if (rows <= together) return OF[kind](x, layers, count, rows, inputs);
    std::vector<Layer> some(layers, layers + count);
    for (long from = 0; from < rows; from += together) {
        OF[kind](x + from * inputs, some.data(), count, std::min(together, rows - from), inputs);
        for (Layer& of : some) of.y += together * of.outputs;
    }
}

AGAIN(fw_linear)
