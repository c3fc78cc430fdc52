// y = x Wᵀ + b, W in codes of 8 or 4 bits with a scale, and mostly an offset, for each output and group of neighbouring inputs:
// W = scale · number(code) + offset. Codes are numbers that bfloat16 holds, and sums of their products are taken group by group, so that
// nothing is rounded but x, as it is given, and y.
//
// As everywhere, a row's result does not depend on how many others there are.
#include "amx.h"
#include "grouped_words.h"
#include "panels.h"

using namespace panels;

using namespace grouped;

namespace {

#if defined(__AVX512BF16__)

// Numbers of a panel in pairs: of the k-th two inputs, of the outputs of one half.
struct Wide {
    const uint16_t* at;
    __m512bh pairs(long k, int half) const { return ::pairs(at + (2 * k + half) * PANEL); }
    void coming(long k) const {
        _mm_prefetch((const char*)(at + (k + 16) * PANEL * 2), _MM_HINT_T0);
        _mm_prefetch((const char*)(at + (k + 16) * PANEL * 2 + PANEL), _MM_HINT_T0);
    }
};

struct Bytes {
    const int8_t* at;
    __m512bh pairs(long k, int half) const { return ::pairs(at + (2 * k + half) * PANEL); }
    void coming(long k) const { _mm_prefetch((const char*)(at + (k + 16) * PANEL * 2), _MM_HINT_T0); }
};

struct Nibbles {
    const uint8_t* at;
    __m512i table;  // twice, as five bits of each index are looked at
    Nibbles(const uint8_t* codes, const uint16_t* of_code) : at(codes) {
        const __m256i once = _mm256_loadu_si256((const __m256i*)of_code);
        table = _mm512_inserti64x4(_mm512_castsi256_si512(once), once, 1);
    }
    __m512bh pairs(long k, int half) const {
        const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(at + (2 * k + half) * 16)));
        return (__m512bh)_mm512_permutexvar_epi16(_mm512_or_si512(both, _mm512_slli_epi32(both, 12)), table);
    }
    void coming(long k) const { _mm_prefetch((const char*)(at + (k + 32) * PANEL), _MM_HINT_T0); }
};

// Each group of `pairs` pairs has a scale for each output, and mostly an offset of its numbers.
template <int ROWS, typename W>
void tile(const uint16_t* x, long x_stride, const W& w, const float* scale, const float* offset, const float* of_x, const float* bias,
          uint16_t* y, long y_stride, long groups, long pairs, int columns) {
    alignas(64) float sums[ROWS][PANEL] = {};
    for (long g = 0; g < groups; g++) {
        __m512 low[ROWS], high[ROWS];
        for (int r = 0; r < ROWS; r++) low[r] = high[r] = _mm512_setzero_ps();
        for (long k = g * pairs; k < (g + 1) * pairs; k++) {
            w.coming(k);
            const __m512bh first = w.pairs(k, 0), second = w.pairs(k, 1);
            for (int r = 0; r < ROWS; r++) {
                const __m512bh of = repeated(x + r * x_stride + 2 * k);
                low[r] = _mm512_dpbf16_ps(low[r], first, of);
                high[r] = _mm512_dpbf16_ps(high[r], second, of);
            }
        }
        for (int half = 0; half < 2; half++) {
            const __m512 by = _mm512_loadu_ps(scale + g * PANEL + half * 16);
            const __m512 add = offset ? _mm512_loadu_ps(offset + g * PANEL + half * 16) : _mm512_setzero_ps();
            for (int r = 0; r < ROWS; r++) {
                float* to = sums[r] + half * 16;
                __m512 sum = _mm512_fmadd_ps(half ? high[r] : low[r], by, _mm512_load_ps(to));
                if (offset) sum = _mm512_fmadd_ps(add, _mm512_set1_ps(of_x[r * groups + g]), sum);
                _mm512_store_ps(to, sum);
            }
        }
    }
    for (int r = 0; r < ROWS; r++) finish(loaded(sums[r]), loaded(sums[r] + LANES), nullptr, bias, y + r * y_stride, columns);
}

#elif !defined(FW_WORDS)

struct Wide {
    const uint16_t* at;
    float operator()(long k, int n, int which) const { return from_bf16(at[(k * PANEL + n) * 2 + which]); }
};

struct Bytes {
    const int8_t* at;
    float operator()(long k, int n, int which) const { return float(at[(k * PANEL + n) * 2 + which]); }
};

struct Nibbles {
    const uint8_t* at;
    const uint16_t* table;
    float operator()(long k, int n, int which) const { return from_bf16(table[at[k * PANEL + n] >> 4 * which & 15]); }
};

template <int ROWS, typename W>
void tile(const uint16_t* x, long x_stride, const W& w, const float* scale, const float* offset, const float* of_x, const float* bias,
          uint16_t* y, long y_stride, long groups, long pairs, int columns) {
    float sums[ROWS][PANEL] = {};
    for (long g = 0; g < groups; g++) {
        float found[ROWS][PANEL] = {};
        for (long k = g * pairs; k < (g + 1) * pairs; k++) {
            float first[PANEL], second[PANEL];
            for (int n = 0; n < PANEL; n++) first[n] = w(k, n, 0), second[n] = w(k, n, 1);
            for (int r = 0; r < ROWS; r++) {
                const float even = from_bf16(x[r * x_stride + 2 * k]), odd = from_bf16(x[r * x_stride + 2 * k + 1]);
                for (int n = 0; n < PANEL; n++) found[r][n] += even * first[n] + odd * second[n];
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int n = 0; n < PANEL; n++) {
                sums[r][n] += found[r][n] * scale[g * PANEL + n];
                if (offset) sums[r][n] += offset[g * PANEL + n] * of_x[r * groups + g];
            }
    }
    for (int r = 0; r < ROWS; r++) finish(loaded(sums[r]), loaded(sums[r] + LANES), nullptr, bias, y + r * y_stride, columns);
}

#endif

template <int ROWS, typename W>
void rows_left(int rows, const uint16_t* x, long xs, const W& w, const float* scale, const float* offset, const float* of_x,
               const float* bias, uint16_t* y, long ys, long groups, long pairs, int columns) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            tile<ROWS>(x, xs, w, scale, offset, of_x, bias, y, ys, groups, pairs, columns);
        else
            rows_left<ROWS - 1>(rows, x, xs, w, scale, offset, of_x, bias, y, ys, groups, pairs, columns);
    }
}

#if defined(FW_AMX)
// A panel from one of its rows on, as numbers of bfloat16: sixteen rows at a time.
template <typename W>
struct Numbers {
    const W& w;
    long first;
    amx::Ring& ring;

    void copy(long k, long count, char* to) const {
        for (long i = 0; i < count; i++) {
            w.coming(first + k + i);
            for (int half = 0; half < 2; half++)
                _mm512_storeu_si512(to + i * amx::PANEL_BYTES + half * 64, (__m512i)w.pairs(first + k + i, half));
        }
    }

    const char* rows(long k) const {
        char* to = ring.next();
        copy(k, amx::SIDE, to);
        amx::settle();
        return to;
    }
};

inline amx::Panel from(const Wide& w, long first, amx::Ring&) { return {(const char*)(w.at + first * PANEL * 2)}; }

template <typename W>
Numbers<W> from(const W& w, long first, amx::Ring& ring) {
    return {w, first, ring};
}

template <typename W>
void by_tiles(const uint16_t* x, const W& w, const float* scale, const float* offset, const float* of_x, const float* bias, uint16_t* y,
              long rows, long inputs, long outputs, long group, int columns) {
    constexpr long ROWS = amx::ROWS, SIDE = amx::SIDE, STEP = PANEL * sizeof(float);
    const long groups = inputs / group;
    alignas(64) float sums[ROWS][PANEL], found[ROWS][PANEL];
    auto nothing = [](long) {};
    amx::Ring ring;
    amx::Tiles tiles(std::min(rows, ROWS));
    for (long begin = 0; begin < rows; begin += ROWS) {
        const long here = std::min(ROWS, rows - begin);
        if (begin && here < ROWS) tiles.shape(here);
        std::memset(sums, 0, sizeof sums);
        for (long g = 0; g < groups; g++) {
            const uint16_t* a = x + begin * inputs + g * group;
            const auto panel = from(w, g * group / 2, ring);
            if (here > SIDE)
                amx::product<amx::Of::BF16, true, false>(a, inputs * 2, panel, group / 2, found, STEP, here, nothing);
            else
                amx::product<amx::Of::BF16, false, false>(a, inputs * 2, panel, group / 2, found, STEP, here, nothing);
            for (int half = 0; half < PANEL; half += 16) {
                const __m512 by = _mm512_loadu_ps(scale + g * PANEL + half);
                const __m512 add = offset ? _mm512_loadu_ps(offset + g * PANEL + half) : _mm512_setzero_ps();
                for (long r = 0; r < here; r++) {
                    __m512 sum = _mm512_fmadd_ps(_mm512_load_ps(found[r] + half), by, _mm512_load_ps(sums[r] + half));
                    if (offset) sum = _mm512_fmadd_ps(add, _mm512_set1_ps(of_x[(begin + r) * groups + g]), sum);
                    _mm512_store_ps(sums[r] + half, sum);
                }
            }
        }
        for (long r = 0; r < here; r++)
            finish(loaded(sums[r]), loaded(sums[r] + LANES), nullptr, bias, y + (begin + r) * outputs, columns);
    }
}
#endif

// As above, by groups; `in_fp32` is x so, where that is used.
template <typename W>
void against(const uint16_t* x, const words::Rows& in_fp32, const W& w, const float* scale, const float* offset, const float* of_x, const float* bias, uint16_t* y,
             long rows, long inputs, long outputs, long group, int columns) {
#if defined(FW_AMX)
    if (amx::here) return by_tiles(x, w, scale, offset, of_x, bias, y, rows, inputs, outputs, group, columns);
#endif
#if defined(FW_WORDS)
    if (in_fp32.there()) return by_numbers(in_fp32, w, scale, offset, of_x, bias, y, rows, inputs, outputs, group, columns);
#endif
    const long tiles = (rows + MOST - 1) / MOST, groups = inputs / group;
    for (long t = 0; t < tiles; t++) {
        const long from = rows * t / tiles, to = rows * (t + 1) / tiles;
        rows_left<MOST>(int(to - from), x + from * inputs, inputs, w, scale, offset, of_x ? of_x + from * groups : nullptr, bias,
                        y + from * outputs, outputs, groups, group / 2, columns);
    }
}

#if defined(FW_WORDS)
// Nothing: numbers are made where they are multiplied.
#elif defined(__AVX512BF16__)
// Sixteen bytes at a time, as many as a panel has a multiple of.
void numbers_of(const uint8_t* codes, const uint16_t* table, long count, uint16_t* to) {
    const Nibbles all{codes, table};
    for (long i = 0; i < count / 16; i++) _mm512_storeu_si512(to + 32 * i, (__m512i)all.pairs(i / 2, int(i % 2)));
}
#else
void numbers_of(const uint8_t* codes, const uint16_t* table, long count, uint16_t* to) {
    for (long i = 0; i < count; i++) {
        to[2 * i] = table[codes[i] & 15];
        to[2 * i + 1] = table[codes[i] >> 4];
    }
}
#endif

constexpr long MANY = 3;  // rows from which on it pays to make numbers of codes once for all
#if !defined(FW_WORDS)
constexpr long FEW = 2 * MOST;  // rows for which codes are made into numbers as they are needed, each time
#endif

float sum_of(const uint16_t* x, long count) {
    Lane many = {};
    long k = 0;
    for (; k + LANES <= count; k += LANES) many += loaded(x + k);
    float sum = added_up(many);
    for (; k < count; k++) sum += from_bf16(x[k]);
    return sum;
}

// Codes of 8 bits, or of 4, two neighbours in a byte; with a scale, and mostly an offset, for each output and group of inputs.
template <bool FOUR>
void linear(const uint16_t* x, const Layer* layers, long count, long rows, long inputs) {
    // Sums of x over the groups that layers have.
    std::vector<std::vector<float>> sums(count);
    const long together = std::max<long>(1, (1 << 14) / inputs);
    for (long l = 0; l < count; l++) {
        if (!layers[l].offset) continue;
        const long group = layers[l].group, groups = inputs / group;
        sums[l].resize(rows * groups);
        pool::each((rows + together - 1) / together, [&](long piece) {
            for (long i = piece * together * groups; i < std::min(rows, (piece + 1) * together) * groups; i++)
                sums[l][i] = sum_of(x + i * group, group);
        });
    }
    const words::Rows in_fp32 = words::Rows::in_fp32(x, rows, inputs, MANY);
    each_panel(layers, count, rows, PANEL * inputs / (FOUR ? 2 : 1),
               [&](const Layer& of, long p, int columns, const char*, uint16_t* y, long step) {
        const long at = p * PANEL * (inputs / of.group);
        const float *scale = of.scale + at, *offset = of.offset ? of.offset + at : nullptr;
        const float *of_x = offset ? sums[&of - layers].data() : nullptr, *bias = of.bias ? of.bias + p * PANEL : nullptr;
        auto with = [&](const auto& w) {
            against(x, in_fp32, w, scale, offset, of_x, bias, y, rows, inputs, step, of.group, columns);
        };
        const uint8_t* codes = (const uint8_t*)of.weight + p * PANEL * inputs / (FOUR ? 2 : 1);
        auto as_they_are = [&] {
            if constexpr (FOUR)
                with(Nibbles{codes, of.table});
            else
                with(Bytes{(const int8_t*)codes});
        };
#if defined(FW_WORDS)
        as_they_are();
#else
        if (rows <= FEW) return as_they_are();
        thread_local std::vector<uint16_t> wide;
        wide.resize(PANEL * inputs);
        if constexpr (FOUR)
            numbers_of(codes, of.table, PANEL * inputs / 2, wide.data());
        else
            widen((const int8_t*)codes, PANEL * inputs, wide.data());
        with(Wide{wide.data()});
#endif
    });
}

}  // namespace

void grouped::four_bits(const uint16_t* x, const Layer* layers, long count, long rows, long inputs) {
    linear<true>(x, layers, count, rows, inputs);
}

void grouped::eight_bits(const uint16_t* x, const Layer* layers, long count, long rows, long inputs) {
    linear<false>(x, layers, count, rows, inputs);
}
