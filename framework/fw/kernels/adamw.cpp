// AdamW (Loshchilov and Hutter 2019): one pass over a parameter, its gradient and both moments, computed in fp32.
#include <algorithm>
#include <cmath>

#include "lanes.h"
#include "pool.h"

namespace {

constexpr long PIECE = 1 << 14;  // numbers that a thread takes at once

struct How {
    float factor, keep, first, second, eps, rate, root;
};

inline Lane root_of(Lane x) {
#if defined(__AVX512F__)
    return (Lane)_mm512_sqrt_ps((__m512)x);
#else
    for (int l = 0; l < LANES; l++) x[l] = std::sqrt(x[l]);
    return x;
#endif
}

template <typename T, typename G>
inline void change(T* p, const G* g, T* m, T* v, const How& how) {
    const Lane grad = loaded(g) * how.factor;
    const Lane mean = loaded(m) + how.first * (grad - loaded(m));
    const Lane square = how.second * loaded(v) + (1.0f - how.second) * grad * grad;
    stored(p, how.keep * loaded(p) - how.rate * mean / (root_of(square) / how.root + how.eps));
    stored(m, mean);
    stored(v, square);
}

template <typename T, typename G>
void changed(T* p, const G* g, T* m, T* v, long count, const How& how) {
    pool::each((count + PIECE - 1) / PIECE, [=](long piece) {
        const long end = std::min(count, (piece + 1) * PIECE);
        long i = piece * PIECE;
        for (; i + LANES <= end; i += LANES) change(p + i, g + i, m + i, v + i, how);
        if (i == end) return;
        T last[3][LANES] = {};  // computed as all others: where a tensor ends must not show
        G grad[LANES] = {};
        T* const to[] = {p + i, m + i, v + i};
        for (int k = 0; k < 3; k++) std::copy_n(to[k], end - i, last[k]);
        std::copy_n(g + i, end - i, grad);
        change(last[0], grad, last[1], last[2], how);
        for (int k = 0; k < 3; k++) std::copy_n(last[k], end - i, to[k]);
    });
}

}  // namespace

// p, m, v after a step, of `count` numbers in bfloat16 where `half`, else in fp32, g where `grad_half`: m += first (g factor - m),
// v = second v + (1 - second) (g factor)², p = keep p - rate m / (√v / root + eps).
extern "C" void fw_adamw(void* p, const void* g, void* m, void* v, long half, long grad_half, long count, float factor, float keep, float first, float second,
                         float eps, float rate, float root) {
    const How how{factor, keep, first, second, eps, rate, root};
    half ? changed((uint16_t*)p, (const uint16_t*)g, (uint16_t*)m, (uint16_t*)v, count, how)
    : grad_half ? changed((float*)p, (const uint16_t*)g, (float*)m, (float*)v, count, how)
                : changed((float*)p, (const float*)g, (float*)m, (float*)v, count, how);
}
