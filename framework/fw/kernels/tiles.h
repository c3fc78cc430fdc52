// Products of matrices that lie in the nearest caches, summed in fp32: what kernels that train are made of.
//
// One factor is read by rows, the other in panels of 32 columns. Numbers are fp32, or bfloat16 in pairs of neighbours along what is summed
// over where the processor multiplies such pairs; either way a word is 32 bits, so that both are packed alike.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "amx.h"
#include "lanes.h"

namespace tiles {

constexpr int PANEL = 32;

#if defined(__AVX512BF16__)
typedef uint16_t Kept;  // as what bfloat16 is multiplied
#else
typedef float Kept;
#endif

// Numbers in a word.
template <typename E>
constexpr int TOGETHER = 4 / sizeof(E);

inline void converted(const float* from, float* to, long count) { std::memcpy(to, from, count * sizeof(float)); }
inline void converted(const uint16_t* from, uint16_t* to, long count) { std::memcpy(to, from, count * sizeof(uint16_t)); }

inline void converted(const uint16_t* from, float* to, long count) {
    for (long i = 0; i < count; i++) to[i] = from_bf16(from[i]);
}

inline void converted(const float* from, uint16_t* to, long count) {
    long i = 0;
#if defined(__AVX512BF16__)
    for (; i + 32 <= count; i += 32) {
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
        _mm512_storeu_si512(to + i, (__m512i)both);
    }
#endif
    for (; i < count; i++) to[i] = to_bf16(from[i]);
}

// `count` rows of `width` numbers, `step` apart, one behind another.
template <typename T, typename E>
void gather(const T* from, long step, long count, long width, E* to) {
    for (long r = 0; r < count; r++) converted(from + r * step, to + r * width, width);
}

// [rows, words] -> [words, rows]: words `step` apart from row to row, `to_step` from one of the results to the next.
inline void turned(const int32_t* from, long step, long rows, long words, int32_t* to, long to_step) {
    long r = 0;
#if defined(__AVX512F__)
    for (; r + 16 <= rows; r += 16) {
        long w = 0;
        for (; w + 16 <= words; w += 16) {
            __m512i square[16];
            for (int i = 0; i < 16; i++) square[i] = _mm512_loadu_si512(from + (r + i) * step + w);
            turn(square);
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + (w + i) * to_step + r, square[i]);
        }
        for (; w < words; w++)
            for (int i = 0; i < 16; i++) to[w * to_step + r + i] = from[(r + i) * step + w];
    }
#endif
    for (; r < rows; r++)
        for (long w = 0; w < words; w++) to[w * to_step + r] = from[r * step + w];
}

// Rows [count, width] as the columns of panels, [⌈count/32⌉, width/g, 32, g]; columns that are not there are zeros.
template <typename E>
void panels_of_columns(const E* from, long count, long width, E* to) {
    const long words = width / TOGETHER<E>;
    for (long begin = 0; begin < count; begin += PANEL) {
        int32_t* panel = (int32_t*)to + begin * words;
        const long here = std::min<long>(PANEL, count - begin);
        if (here < PANEL) std::fill_n(panel, words * PANEL, 0);
        turned((const int32_t*)(from + begin * width), words, here, words, panel, PANEL);
    }
}

// Two rows of bfloat16 as pairs, a word for each column.
inline void paired(const uint16_t* first, const uint16_t* second, long width, int32_t* to) {
    for (long i = 0; i < width; i++) to[i] = int32_t(uint32_t(first[i]) | uint32_t(second[i]) << 16);
}

// Rows [count, width] as what is summed over, in panels of their columns: [⌈width/32⌉, ⌈count/g⌉, 32, g]; a row or column that is not there is
// zeros.
inline void panels_of_rows(const float* from, long count, long width, float* to) {
    for (long begin = 0; begin < width; begin += PANEL) {
        const long here = std::min<long>(PANEL, width - begin);
        for (long r = 0; r < count; r++, to += PANEL) {
            std::memcpy(to, from + r * width + begin, here * sizeof(float));
            std::fill(to + here, to + PANEL, 0.0f);
        }
    }
}

inline void panels_of_rows(const uint16_t* from, long count, long width, uint16_t* to) {
    static const uint16_t none[PANEL] = {};
    int32_t* words = (int32_t*)to;
    for (long begin = 0; begin < width; begin += PANEL) {
        const long here = std::min<long>(PANEL, width - begin);
        for (long r = 0; r < count; r += 2, words += PANEL) {
            const uint16_t* row = from + r * width + begin;
            paired(row, r + 1 < count ? row + width : none, here, words);
            std::fill(words + here, words + PANEL, 0);
        }
    }
}

// Rows [count, width] turned: [width, room], with zeros from `count` to `room`, which is even.
inline void turned_rows(const float* from, long count, long width, long room, float* to) {
    turned((const int32_t*)from, width, count, width, (int32_t*)to, room);
    for (long w = 0; w < width && count < room; w++) std::fill(to + w * room + count, to + (w + 1) * room, 0.0f);
}

inline void turned_rows(const uint16_t* from, long count, long width, long room, uint16_t* to) {
    for (long r = 0; r < room; r += 2 * LANES) {  // so many pairs at a time
        int32_t pairs[LANES][PANEL];
        for (long begin = 0; begin < width; begin += PANEL) {
            const long here = std::min<long>(PANEL, width - begin), most = std::min<long>(LANES, (room - r) / 2);
            for (long p = 0; p < most; p++) {
                static const uint16_t none[PANEL] = {};
                const long row = r + 2 * p;
                const uint16_t* first = from + row * width + begin;
                paired(row < count ? first : none, row + 1 < count ? first + width : none, here, pairs[p]);
            }
            turned(&pairs[0][0], PANEL, most, here, (int32_t*)(to + begin * room + r), room / 2);
        }
    }
}

// c [ROWS, 32] (+)= a [ROWS, k] · panel, of bfloat16 or of fp32; k even for bfloat16.
#if defined(__AVX512BF16__)
constexpr int MOST = 12;

template <int ROWS, bool ADD>
inline void product(const uint16_t* a, long a_step, const uint16_t* panel, float* c, long c_step, long k) {
    __m512 low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; r++) {
        low[r] = ADD ? _mm512_loadu_ps(c + r * c_step) : _mm512_setzero_ps();
        high[r] = ADD ? _mm512_loadu_ps(c + r * c_step + 16) : _mm512_setzero_ps();
    }
    for (long i = 0; i < k; i += 2) {
        const __m512bh first = (__m512bh)_mm512_loadu_si512(panel + i * PANEL), second = (__m512bh)_mm512_loadu_si512(panel + i * PANEL + 32);
        for (int r = 0; r < ROWS; r++) {
            int32_t pair;
            std::memcpy(&pair, a + r * a_step + i, 4);
            const __m512bh of = (__m512bh)_mm512_set1_epi32(pair);
            low[r] = _mm512_dpbf16_ps(low[r], first, of);
            high[r] = _mm512_dpbf16_ps(high[r], second, of);
        }
    }
    for (int r = 0; r < ROWS; r++) _mm512_storeu_ps(c + r * c_step, low[r]), _mm512_storeu_ps(c + r * c_step + 16, high[r]);
}
#elif defined(__AVX512F__)
constexpr int MOST = 12;
#elif defined(__AVX__)
constexpr int MOST = 6;
#else
constexpr int MOST = 4;
#endif

template <int ROWS, bool ADD>
inline void product(const float* a, long a_step, const float* panel, float* c, long c_step, long k) {
    for (int begin = 0; begin < PANEL; begin += 2 * NATIVE) {
        Native low[ROWS], high[ROWS];
        for (int r = 0; r < ROWS; r++) {
            low[r] = ADD ? native(c + r * c_step + begin) : Native{};
            high[r] = ADD ? native(c + r * c_step + begin + NATIVE) : Native{};
        }
        for (long i = 0; i < k; i++) {
            const Native first = native(panel + i * PANEL + begin), second = native(panel + i * PANEL + begin + NATIVE);
            for (int r = 0; r < ROWS; r++) {
                const float of = a[r * a_step + i];
                low[r] += of * first;
                high[r] += of * second;
            }
        }
        for (int r = 0; r < ROWS; r++) {
            std::memcpy(c + r * c_step + begin, &low[r], sizeof low[r]);
            std::memcpy(c + r * c_step + begin + NATIVE, &high[r], sizeof high[r]);
        }
    }
}

template <int ROWS, bool ADD, typename E>
inline void some_rows(long rows, const E* a, long a_step, const E* panel, float* c, long c_step, long k) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            product<ROWS, ADD>(a, a_step, panel, c, c_step, k);
        else
            some_rows<ROWS - 1, ADD>(rows, a, a_step, panel, c, c_step, k);
    }
}

// What `multiplied` needs of its thread: one is there as long as it is called. Of rows that are no multiple of 16 it may read and write more,
// up to that.
class Multiplying {
public:
    Multiplying() {
#if defined(FW_AMX)
        if (amx::here) tiles.emplace();
#endif
    }

private:
#if defined(FW_AMX)
    std::optional<amx::Tiles> tiles;
#endif
};

// c [rows, 32 · panels] (+)= a [rows, k] · b, in panels of k numbers each.
template <bool ADD, typename E>
void multiplied(const E* a, long a_step, const E* b, long panels, float* c, long c_step, long rows, long k) {
    const long words = (k + TOGETHER<E> - 1) / TOGETHER<E> * TOGETHER<E>;
#if defined(FW_AMX)
    if constexpr (sizeof(E) == 2)
        if (amx::here) {
            auto nothing = [](long) {};
            const long step = a_step * long(sizeof(E)), to_step = c_step * long(sizeof(float));
            for (long p = 0; p < panels; p++) {
                const amx::Panel panel{(const char*)(b + p * words * PANEL)};
                for (long r = 0; r < rows; r += amx::ROWS) {
                    const E* from = a + r * a_step;
                    float* to = c + r * c_step + p * PANEL;
                    if (rows - r > amx::SIDE)
                        amx::product<amx::Of::BF16, true, ADD>(from, step, panel, words / 2, to, to_step, amx::ROWS, nothing);
                    else
                        amx::product<amx::Of::BF16, false, ADD>(from, step, panel, words / 2, to, to_step, amx::SIDE, nothing);
                }
            }
            return;
        }
#endif
    const long parts = (rows + MOST - 1) / MOST;
    for (long p = 0; p < panels; p++)
        for (long t = 0; t < parts; t++) {
            const long from = rows * t / parts, to = rows * (t + 1) / parts;
            some_rows<MOST, ADD>(to - from, a + from * a_step, a_step, b + p * words * PANEL, c + from * c_step + p * PANEL, c_step, words);
        }
}

}  // namespace tiles
