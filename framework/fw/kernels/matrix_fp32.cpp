// Products of whole matrices in fp32, for processors where the library that torch has for them leaves half of AVX-512 unused.
//
// The second factor is packed into panels of 32 columns, so much of it as stays in the caches of all cores; rows of the first are multiplied as
// they lie, twelve at a time. Each output is one sum in the same order whatever the number of threads.
#include <algorithm>
#include <cstring>
#if defined(__AVX512F__)
#include <cpuid.h>
#endif

#include "lanes.h"
#include "matrix_parts.h"
#include "pool.h"

using namespace matrix;

namespace {

#if defined(__AVX512F__)

constexpr long PANEL = 2 * LANES, DEEP = 512;  // columns, and what is summed over before sums go to c
constexpr int MOST = 12;                       // rows of a tile
constexpr long PACKED = 4 << 20;               // bytes of panels that are there at once, about
constexpr long NEAR = 1 << 18;                 // bytes of rows that stay in a core's cache beside a panel
constexpr long AHEAD = 16;                     // steps whose numbers of a panel are fetched

inline __mmask16 some(long count) { return count >= LANES ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

// Sixteen rows of so many numbers, `step` apart, turned: the k-th number of each lies at to + k · to_step. What is not there is zero.
inline void turn_square(const float* from, long step, long rows, long count, float* to, long to_step) {
    __m512i square[LANES];
    for (long r = 0; r < LANES; r++) square[r] = _mm512_maskz_loadu_epi32(r < rows ? some(count) : 0, from + (r < rows ? r * step : 0));
    turn(square);
    for (long k = 0; k < std::min<long>(LANES, count); k++) _mm512_storeu_si512(to + k * to_step, square[k]);
}

// Columns of b, up to a panel, and of what is summed over so many from one on: [inner, 32].
void pack(const Product& p, long column, long from, long inner, float* to) {
    const float* b = (const float*)p.b;
    const long here = std::min(PANEL, p.columns - column);
    if (p.b_turned) {
        for (long half = 0; half < 2; half++)
            for (long k = 0; k < inner; k += LANES)
                turn_square(b + (column + half * LANES) * p.b_step + from + k, p.b_step, here - half * LANES, inner - k, to + k * PANEL + half * LANES,
                            PANEL);
        return;
    }
    for (long k = 0; k < inner; k++) {
        const float* row = b + (from + k) * p.b_step + column;
        _mm512_storeu_ps(to + k * PANEL, _mm512_maskz_loadu_ps(some(here), row));
        _mm512_storeu_ps(to + k * PANEL + LANES, _mm512_maskz_loadu_ps(some(here - LANES), row + LANES));
    }
}

// c [ROWS, columns] (+)= a [ROWS, inner] · panel.
template <int ROWS>
void tile(const float* a, long a_step, const float* panel, long inner, float* c, long c_step, long columns, bool add) {
    __m512 low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; r++) low[r] = high[r] = _mm512_setzero_ps();
    for (long k = 0; k < inner; k++, panel += PANEL) {
        _mm_prefetch((const char*)(panel + AHEAD * PANEL), _MM_HINT_T0);
        _mm_prefetch((const char*)(panel + AHEAD * PANEL + LANES), _MM_HINT_T0);
        const __m512 first = _mm512_loadu_ps(panel), second = _mm512_loadu_ps(panel + LANES);
        for (int r = 0; r < ROWS; r++) {
            const __m512 of = _mm512_set1_ps(a[r * a_step + k]);
            low[r] = _mm512_fmadd_ps(first, of, low[r]);
            high[r] = _mm512_fmadd_ps(second, of, high[r]);
        }
    }
    const __mmask16 of_low = some(columns), of_high = some(columns - LANES);
    for (int r = 0; r < ROWS; r++) {
        float* to = c + r * c_step;
        if (add) low[r] += _mm512_maskz_loadu_ps(of_low, to), high[r] += _mm512_maskz_loadu_ps(of_high, to + LANES);
        _mm512_mask_storeu_ps(to, of_low, low[r]);
        _mm512_mask_storeu_ps(to + LANES, of_high, high[r]);
    }
}

template <int ROWS>
void rows_left(long rows, const float* a, long a_step, const float* panel, long inner, float* c, long c_step, long columns, bool add) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            tile<ROWS>(a, a_step, panel, inner, c, c_step, columns, add);
        else
            rows_left<ROWS - 1>(rows, a, a_step, panel, inner, c, c_step, columns, add);
    }
}

// Rows of c from one on, by panels of so many columns from one on.
void rows_of(const Product& p, long row, long rows, long column, long columns, long from, long inner, const float* panels) {
    thread_local Kept<float> room;
    const float* a = (const float*)p.a + (p.a_turned ? from * p.a_step + row : row * p.a_step + from);
    long step = p.a_step;
    if (p.a_turned) {
        step = (inner + LANES - 1) / LANES * LANES + LANES;  // rows that lie a power of two apart would take each other's place in the cache
        float* const turned = room.of((rows + LANES) * step);
        for (long r = 0; r < rows; r += LANES)
            for (long k = 0; k < inner; k += LANES)
                turn_square(a + k * p.a_step + r, p.a_step, inner - k, rows - r, turned + r * step + k, step);
        a = turned;
    }
    const long tiles = (rows + MOST - 1) / MOST;
    for (long n = 0; n < columns; n += PANEL, panels += inner * PANEL)
        for (long t = 0; t < tiles; t++) {
            const long begin = rows * t / tiles, end = rows * (t + 1) / tiles;
            rows_left<MOST>(end - begin, a + begin * step, step, panels, inner, (float*)p.c + (row + begin) * p.c_step + column + n, p.c_step,
                            std::min(PANEL, columns - n), p.add || from);
        }
}

void computed(const Product& p) {
    thread_local Kept<float> room;
    const long parts = (p.inner + DEEP - 1) / DEEP, most = (p.inner + parts - 1) / parts, threads = pool::threads();
    const long together = std::max(PANEL, PACKED / long(most * sizeof(float)) / PANEL * PANEL);
    float* const panels = room.of((std::min(together, p.columns) + PANEL) * most);
    for (long column = 0; column < p.columns; column += together)
        for (long from = 0; from < p.inner; from += most) {
            const long columns = std::min(together, p.columns - column), inner = std::min(most, p.inner - from), count = (columns + PANEL - 1) / PANEL;
            pool::each(count, [&](long n) { pack(p, column + n * PANEL, from, inner, panels + n * inner * PANEL); });
            const long near = std::max<long>(MOST, NEAR / long(inner * sizeof(float)) / MOST * MOST);
            const long fair = ((p.rows + threads - 1) / threads + MOST - 1) / MOST * MOST, block = std::min(near, fair);
            const long blocks = (p.rows + block - 1) / block, shares = std::min(count, std::max<long>(1, threads / blocks));
            pool::each(blocks * shares, [&](long task) {
                const long row = task / shares * block, begin = count * (task % shares) / shares, end = count * (task % shares + 1) / shares;
                rows_of(p, row, std::min(block, p.rows - row), column + begin * PANEL, std::min(columns, end * PANEL) - begin * PANEL, from, inner,
                        panels + begin * inner * PANEL);
            });
        }
}

#endif

}  // namespace

// Whether this processor multiplies twice as many numbers at once as MKL has it do: AMD's whose units are as wide as registers of 512 bits, from
// family 1Ah (Zen 5) on.
extern "C" long fw_products_of_fp32_pay() {
#if defined(__AVX512F__)
    unsigned a, b, c, d;
    char maker[13] = {};
    if (!__get_cpuid(0, &a, &b, &c, &d)) return 0;
    std::memcpy(maker, &b, 4), std::memcpy(maker + 4, &d, 4), std::memcpy(maker + 8, &c, 4);
    if (std::strcmp(maker, "AuthenticAMD") || !__get_cpuid(1, &a, &b, &c, &d)) return 0;
    const unsigned family = (a >> 8 & 0xf) == 0xf ? 0xf + (a >> 20 & 0xff) : a >> 8 & 0xf;
    return family >= 0x1a;
#else
    return 0;
#endif
}

// All in fp32, whatever `half` says.
extern "C" void fw_product_fp32(const Product* p) {
#if defined(__AVX512F__)
    computed(*p);
#endif
}
