// y = x Wᵀ + b of whole numbers: W as codes of 8 bits with a scale for each output, and each row of x as such codes with a scale of its own.
//
// Sums are whole numbers, whatever the order.
#include <algorithm>
#include <cmath>
#include <vector>

#include "amx_rows.h"
#include "panels.h"
#include "words.h"

#if defined(FW_WORDS) && !defined(__AVX512VNNI__)  // which multiplies four codes at once, and needs no words
#define FW_PAIRS
#endif

using namespace panels;

namespace {

constexpr long FEW_CODES = 8;  // rows up to which registers are as fast as tiles
constexpr long MANY = 2;       // rows from which on it pays to make a panel words first

// Rows of x as codes 0 … 255, 128 for 0, with the scale of each; filled up with 128.
void codes_of(const uint16_t* x, long inputs, long padded, uint8_t* codes, float* scale) {
    typedef uint8_t Codes __attribute__((vector_size(LANES)));
    constexpr float NEAREST = 12582912.0f;  // 1.5 · 2²³: what is added to it is rounded to whole numbers, ties to even
    Lane largest = {};
    const long whole = inputs / LANES * LANES;
    for (long k = 0; k < whole; k += LANES) {
        const Lane value = loaded(x + k), size = value < 0.0f ? -value : value;
        largest = size > largest ? size : largest;
    }
    float most = 0;
    for (int l = 0; l < LANES; l++) most = std::max(most, largest[l]);
    for (long k = whole; k < inputs; k++) most = std::max(most, std::fabs(from_bf16(x[k])));
    *scale = most / 127;
    const float by = most > 0 ? 127 / most : 0;
    for (long k = 0; k < whole; k += LANES) {
        const Lane nearest = (loaded(x + k) * by + NEAREST) - NEAREST;
        const Codes found = __builtin_convertvector(__builtin_convertvector(nearest, Bits) + 128, Codes);
        std::memcpy(codes + k, &found, LANES);
    }
    for (long k = whole; k < inputs; k++) codes[k] = uint8_t(int((from_bf16(x[k]) * by + NEAREST) - NEAREST) + 128);
    for (long k = inputs; k < padded; k++) codes[k] = 128;
}

inline Bits bits(const int32_t* at) {
    Bits value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

#if defined(__AVX512VNNI__)
template <int ROWS>
void count_up(const uint8_t* x, long k4, const int8_t* panel, int32_t* sums) {
    __m512i low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; r++) low[r] = high[r] = _mm512_setzero_si512();
    for (long k = 0; k < k4; k++) {
        const int8_t* w = panel + k * PANEL * 4;
        _mm_prefetch((const char*)(w + 16 * PANEL * 4), _MM_HINT_T0);
        _mm_prefetch((const char*)(w + 16 * PANEL * 4 + 64), _MM_HINT_T0);
        const __m512i first = _mm512_loadu_si512(w), second = _mm512_loadu_si512(w + 64);
        for (int r = 0; r < ROWS; r++) {
            int32_t four;
            std::memcpy(&four, x + (r * k4 + k) * 4, 4);
            const __m512i of = _mm512_set1_epi32(four);
            low[r] = _mm512_dpbusd_epi32(low[r], of, first);
            high[r] = _mm512_dpbusd_epi32(high[r], of, second);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        _mm512_storeu_si512(sums + r * PANEL, low[r]);
        _mm512_storeu_si512(sums + r * PANEL + 16, high[r]);
    }
}
#elif defined(__AVX2__)
// Products of 16 bits, two of which are added up exactly; of each output there are two sums until the end.
template <int ROWS>
void count_up(const uint8_t* x, long k4, const int8_t* panel, int32_t* sums) {
    constexpr int WIDE = 8, AT_ONCE = ROWS == 1 ? 4 : ROWS == 2 ? 2 : 1;
    for (int begin = 0; begin < PANEL; begin += AT_ONCE * WIDE) {
        __m256i low[ROWS][AT_ONCE], high[ROWS][AT_ONCE];
        for (int r = 0; r < ROWS; r++)
            for (int q = 0; q < AT_ONCE; q++) low[r][q] = high[r][q] = _mm256_setzero_si256();
        for (long k = 0; k < k4; k++) {
            const int8_t* w = panel + (k * PANEL + begin) * 4;
            __m256i first[AT_ONCE], second[AT_ONCE];
            for (int q = 0; q < AT_ONCE; q++) {
                first[q] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(w + q * WIDE * 4)));
                second[q] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(w + q * WIDE * 4 + 16)));
            }
            for (int r = 0; r < ROWS; r++) {
                int32_t four;
                std::memcpy(&four, x + (r * k4 + k) * 4, 4);
                const __m256i of = _mm256_cvtepu8_epi16(_mm_set1_epi32(four));
                for (int q = 0; q < AT_ONCE; q++) {
                    low[r][q] = _mm256_add_epi32(low[r][q], _mm256_madd_epi16(of, first[q]));
                    high[r][q] = _mm256_add_epi32(high[r][q], _mm256_madd_epi16(of, second[q]));
                }
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int q = 0; q < AT_ONCE; q++) {
                const __m256i found = _mm256_permute4x64_epi64(_mm256_hadd_epi32(low[r][q], high[r][q]), 0xd8);
                _mm256_storeu_si256((__m256i*)(sums + r * PANEL + begin + q * WIDE), found);
            }
    }
}
#else
template <int ROWS>
void count_up(const uint8_t* x, long k4, const int8_t* panel, int32_t* sums) {
    std::fill_n(sums, ROWS * PANEL, 0);
    for (long k = 0; k < k4; k++)
        for (int r = 0; r < ROWS; r++)
            for (int n = 0; n < PANEL; n++)
                for (int i = 0; i < 4; i++) sums[r * PANEL + n] += int32_t(x[(r * k4 + k) * 4 + i]) * panel[(k * PANEL + n) * 4 + i];
}
#endif

template <int ROWS>
void count_left(int rows, const uint8_t* x, long k4, const int8_t* panel, int32_t* sums) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            count_up<ROWS>(x, k4, panel, sums);
        else
            count_left<ROWS - 1>(rows, x, k4, panel, sums);
    }
}

#if defined(FW_PAIRS)
// Four codes of each of 32 outputs as two words each, of eight outputs in a register.
inline void four_each(const int8_t* at, __m256* first, __m256* second) {
    for (int q = 0; q < 4; q++) {
        const __m256 a = _mm256_castsi256_ps(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(at + q * 32))));
        const __m256 b = _mm256_castsi256_ps(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(at + q * 32 + 16))));
        auto in_order = [](__m256 of) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(of), 0xd8)); };
        first[q] = in_order(_mm256_shuffle_ps(a, b, 0x88));
        second[q] = in_order(_mm256_shuffle_ps(a, b, 0xdd));
    }
}
#endif

}  // namespace

void whole::numbers(const uint16_t* x, const Layer* layers, long count, long rows, long inputs) {
    const long k4 = (inputs + 3) / 4, tiles = (rows + MOST - 1) / MOST;
    std::vector<uint8_t> codes(rows * k4 * 4);
    std::vector<float> of_row(rows);
    const long together = std::max<long>(1, (1 << 14) / inputs);
    pool::each((rows + together - 1) / together, [&](long piece) {
        for (long r = piece * together; r < std::min(rows, (piece + 1) * together); r++)
            codes_of(x + r * inputs, inputs, k4 * 4, codes.data() + r * k4 * 4, &of_row[r]);
    });
#if defined(FW_PAIRS)
    const words::Rows given(rows, 2 * k4, rows >= MANY, [&](long row, long k, long steps, uint32_t* to) {
        const uint8_t* from = codes.data() + row * k4 * 4 + 2 * k;
        for (long i = 0; i < steps; i++) to[i] = uint32_t(from[2 * i]) | uint32_t(from[2 * i + 1]) << 16;
    });
#endif
    each_panel(layers, count, rows, PANEL * k4 * 4, [&](const Layer& of, long p, int columns, const char* next, uint16_t* y, long step) {
        int32_t sums[PANEL] = {};
        std::copy_n(of.sums + p * PANEL, columns, sums);
        const int8_t* panel = (const int8_t*)of.weight + p * PANEL * k4 * 4;
        auto put = [&](long r, const int32_t* counted) {
            Lane halves[2];
            for (int half = 0; half < 2; half++)
                halves[half] = __builtin_convertvector(bits(counted + half * LANES) - 128 * bits(sums + half * LANES), Lane) * of_row[r];
            finish(halves[0], halves[1], of.scale + p * PANEL, of.bias ? of.bias + p * PANEL : nullptr,
                   y + r * step, columns);
        };
#if defined(FW_AMX)
        if (amx::here && rows > FEW_CODES) {  // sums of whole numbers are the same either way
            amx::all_rows<amx::Of::CODES>(codes.data(), k4 * 4, amx::Panel{(const char*)panel}, rows, k4, (const char*)panel, PANEL * k4 * 4,
                                          next, [&](long r, const float* found) { put(r, (const int32_t*)found); });
            return;
        }
#endif
#if defined(FW_PAIRS)
        if (given.there()) {
            thread_local std::vector<int32_t> all;
            all.assign(rows * PANEL, 0);
            words::add_all<words::Codes>(given, 0, 2 * k4, all.data(), [&](long k, __m256* first, __m256* second) {
                four_each(panel + k * PANEL * 2, first, second);
            });
            for (long r = 0; r < rows; r++) put(r, all.data() + r * PANEL);
            return;
        }
#endif
        int32_t found[MOST * PANEL];
        for (long t = 0; t < tiles; t++) {
            const long from = rows * t / tiles, to = rows * (t + 1) / tiles;
            count_left<MOST>(int(to - from), codes.data() + from * k4 * 4, k4, panel, found);
            for (long r = from; r < to; r++) put(r, found + (r - from) * PANEL);
        }
    });
}

