// Sums of squares, in fp64: the same on any number of threads.
#include <algorithm>
#include <vector>

#include "lanes.h"
#include "pool.h"

namespace {

constexpr long PIECE = 1 << 14;  // numbers that a thread takes at once

#if defined(__AVX512F__)
struct Sum {
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    void add(Lane x) {
        const __m512d first = _mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
        const __m512d second = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)x), 1)));
        low = _mm512_fmadd_pd(first, first, low);
        high = _mm512_fmadd_pd(second, second, high);
    }
    double all() const { return _mm512_reduce_add_pd(_mm512_add_pd(low, high)); }
};
#else
struct Sum {
    double of[LANES] = {};
    void add(Lane x) {
        for (int l = 0; l < LANES; l++) of[l] += (double)x[l] * x[l];
    }
    double all() const {
        double found = 0;
        for (int l = 0; l < LANES; l++) found += of[l];
        return found;
    }
};
#endif

template <typename T>
double sum(const T* x, long count) {
    Sum even, odd;  // two, so that one is not waited for
    long i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        even.add(loaded(x + i));
        odd.add(loaded(x + i + LANES));
    }
    for (; i < count; i += LANES) {
        T last[LANES] = {};
        std::copy_n(x + i, std::min<long>(count - i, LANES), last);
        even.add(loaded(last));
    }
    return even.all() + odd.all();
}

}  // namespace

// `sum` is that of the squares of `count` numbers, in bfloat16 where `half`, else in fp32.
extern "C" void fw_squares(const void* x, long half, long count, double* sum_to) {
    const long pieces = (count + PIECE - 1) / PIECE;
    std::vector<double> parts(pieces);
    double* const to = parts.data();
    pool::each(pieces, [=](long piece) {
        const long begin = piece * PIECE, size = std::min(count - begin, PIECE);
        to[piece] = half ? sum((const uint16_t*)x + begin, size) : sum((const float*)x + begin, size);
    });
    double found = 0;
    for (const double part : parts) found += part;
    *sum_to = found;
}
