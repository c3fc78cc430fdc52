// Many rows against one panel on processors that multiply no bfloat16: what is multiplied is made words of 32 bits first, x once for all panels,
// a panel once for all rows, some steps at a time, which stay in a near cache. A word is a number in fp32, or two codes of 16 bits.
#pragma once
#include <algorithm>
#include <vector>

#include "panels.h"

#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512BF16__)
#define FW_WORDS

namespace words {

using panels::PANEL;

// What words are, in registers of WIDTH of them, and rows whose sums of two registers of outputs stay there beside what is multiplied. A sum
// begins with a word of zeros.
#if defined(__AVX512BW__)
constexpr int WIDTH = 16;

struct Numbers {
    typedef __m512 Register;
    static constexpr int ROWS = 12;
    static Register repeated(uint32_t word) { return _mm512_castsi512_ps(_mm512_set1_epi32(int(word))); }
    static Register more(Register sum, Register a, Register b) { return _mm512_fmadd_ps(a, b, sum); }
};

struct Codes {
    typedef __m512i Register;
    static constexpr int ROWS = 12;
    static Register repeated(uint32_t word) { return _mm512_set1_epi32(int(word)); }
    static Register more(Register sum, Register a, Register b) {
        asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(_mm512_madd_epi16(a, b)));  // as below
        return sum;
    }
};
#else
constexpr int WIDTH = 8;

struct Numbers {
    typedef __m256 Register;
    static constexpr int ROWS = 6;
    static Register repeated(uint32_t word) { return _mm256_castsi256_ps(_mm256_set1_epi32(int(word))); }
    static Register more(Register sum, Register a, Register b) { return _mm256_fmadd_ps(a, b, sum); }
};

struct Codes {
    typedef __m256i Register;
    static constexpr int ROWS = 6;
    static Register repeated(uint32_t word) { return _mm256_set1_epi32(int(word)); }
    static Register more(Register sum, Register a, Register b) {
        // GCC moves sums of whole numbers from register to register, and to memory, where it may choose.
        asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(_mm256_madd_epi16(a, b)));
        return sum;
    }
};
#endif
constexpr int COLUMNS = 2 * WIDTH, PARTS = PANEL / COLUMNS;
constexpr long STEPS = 256;  // words at a time

// Eight pairs of neighbours in K in bfloat16, or as codes: the first of each, and the second, in fp32.
inline void apart(const uint16_t* at, __m256& first, __m256& second) {
    const __m256i both = _mm256_loadu_si256((const __m256i*)at);
    first = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    second = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(0xffff0000)));
}

inline void apart(const int8_t* at, __m256& first, __m256& second) {
    const __m256i both = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)at));
    first = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(both, 16), 16));
    second = _mm256_cvtepi32_ps(_mm256_srai_epi32(both, 16));
}

// x as words, in blocks of STEPS of them, one row behind another: rows that are used together would else be as far apart as what a cache has one
// place for.
class Rows {
public:
    // make(row, k, how many, where to) writes a row's words from the k-th on; with `there` false there are none.
    template <typename Make>
    Rows(long rows, long count, bool there, Make&& make) : rows(rows), count(count) {
        if (!there) return;
        all.resize(rows * count);
        pool::each((count + STEPS - 1) / STEPS * rows, [&](long i) {
            const long row = i % rows, k = i / rows * STEPS;
            make(row, k, width(k), all.data() + k * rows + row * width(k));
        });
    }

    // In fp32, where there are `least` rows.
    static Rows in_fp32(const uint16_t* x, long rows, long inputs, long least) {
        return Rows(rows, inputs, rows >= least, [=](long row, long k, long steps, uint32_t* to) {
            for (long i = 0; i < steps; i++) to[i] = uint32_t(x[row * inputs + k + i]) << 16;
        });
    }

    bool there() const { return !all.empty(); }

    // Words that lie in one block with the k-th.
    long width(long k) const { return std::min(STEPS, count - k / STEPS * STEPS); }

    // Where the k-th word of a row is, `width(k)` before that of the next row.
    const uint32_t* at(long row, long k) const { return all.data() + k / STEPS * STEPS * rows + row * width(k) + k % STEPS; }

    const long rows, count;

private:
    std::vector<uint32_t> all;
};

// sums [COUNT, PANEL] += x · a part of the panel.
template <typename OF, int COUNT>
inline void add(const uint32_t* x, long x_step, const uint32_t* part, long steps, uint32_t* sums) {
    typedef typename OF::Register Register;
    auto loaded = [](const uint32_t* at) {
        Register value;
        std::memcpy(&value, at, sizeof value);
        return value;
    };
    Register low[COUNT], high[COUNT];
    for (int r = 0; r < COUNT; r++) low[r] = loaded(sums + r * PANEL), high[r] = loaded(sums + r * PANEL + WIDTH);
    for (long k = 0; k < steps; k++) {
        const Register first = loaded(part + k * COLUMNS), second = loaded(part + k * COLUMNS + WIDTH);
        for (int r = 0; r < COUNT; r++) {
            const Register of = OF::repeated(x[r * x_step + k]);
            low[r] = OF::more(low[r], of, first);
            high[r] = OF::more(high[r], of, second);
        }
    }
    for (int r = 0; r < COUNT; r++) {
        std::memcpy(sums + r * PANEL, &low[r], sizeof low[r]);
        std::memcpy(sums + r * PANEL + WIDTH, &high[r], sizeof high[r]);
    }
}

template <typename OF, int COUNT>
inline void add_left(long count, const uint32_t* x, long x_step, const uint32_t* part, long steps, uint32_t* sums) {
    if constexpr (COUNT > 0) {
        if (count == COUNT)
            add<OF, COUNT>(x, x_step, part, steps, sums);
        else
            add_left<OF, COUNT - 1>(count, x, x_step, part, steps, sums);
    }
}

// sums [rows, PANEL] += x · W over words from `begin` to `end`, both even; pair(k, …) is what belongs to words k and k + 1, eight outputs in a register.
// Each sum is taken in order.
template <typename OF, typename Pair>
void add_all(const Rows& x, long begin, long end, void* sums, Pair&& pair) {
    alignas(64) uint32_t part[PARTS][STEPS][COLUMNS];
    const long tiles = (x.rows + OF::ROWS - 1) / OF::ROWS;
    for (long k = begin, steps; k < end; k += steps) {
        steps = std::min(end - k, STEPS - k % STEPS);
        for (long i = 0; i < steps; i += 2) {
            __m256 first[4], second[4];
            pair(k + i, first, second);
            for (int q = 0; q < 4; q++) {
                float* to = (float*)&part[8 * q / COLUMNS][i][8 * q % COLUMNS];
                _mm256_store_ps(to, first[q]);
                _mm256_store_ps(to + COLUMNS, second[q]);
            }
        }
        for (int p = 0; p < PARTS; p++)
            for (long t = 0; t < tiles; t++) {
                const long from = x.rows * t / tiles, to = x.rows * (t + 1) / tiles;
                add_left<OF, OF::ROWS>(to - from, x.at(from, k), x.width(k), part[p][0], steps, (uint32_t*)sums + from * PANEL + p * COLUMNS);
            }
    }
}

}  // namespace words

#else

namespace words {

// Who multiplies bfloat16 has no use for it.
struct Rows {
    static Rows in_fp32(const uint16_t*, long, long, long) { return {}; }
};

}  // namespace words

#endif
