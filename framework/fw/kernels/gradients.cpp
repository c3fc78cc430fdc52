// Norms, rotation and gates of a model that trains, forward and backward: one pass over memory each, computed in fp32.
#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"
#include "pool.h"

namespace {

constexpr long PIECE = 1 << 15;  // numbers that a thread takes at once

template <typename F>
void each_rows(long rows, long size, F&& f) {
    const long together = std::max<long>(1, PIECE / size);
    pool::each((rows + together - 1) / together, [&](long piece) { f(piece, piece * together, std::min(rows, (piece + 1) * together)); });
}

template <typename X, typename W, typename Y>
void normed(const X* x, const W* w, Y* y, float* scales, long rows, long size, float eps, float shift) {
    each_rows(rows, size, [=](long, long begin, long end) {
        for (long r = begin; r < end; r++) {
            const X* from = x + r * size;
            Lane squares = {};
            for (long i = 0; i < size; i += LANES) {
                const Lane v = loaded(from + i);
                squares += v * v;
            }
            const float scale = scales[r] = 1.0f / std::sqrt(added_up(squares) / float(size) + eps);
            for (long i = 0; i < size; i += LANES) stored(y + r * size + i, loaded(from + i) * scale * (shift + loaded(w + i)));
        }
    });
}

// `sums` [pieces, size] of the weight's gradient: added up by whoever has called.
template <typename X, typename W, typename G>
void normed_back(const G* g, const X* x, const W* w, const float* scales, X* dx, float* sums, long rows, long size, float shift) {
    each_rows(rows, size, [=](long piece, long begin, long end) {
        float* sum = sums + piece * size;
        std::fill_n(sum, size, 0.0f);
        for (long r = begin; r < end; r++) {
            const X* from = x + r * size;
            const G* grad = g + r * size;
            const float scale = scales[r];
            Lane dot = {};
            for (long i = 0; i < size; i += LANES) {
                const Lane along = loaded(from + i) * scale, own = loaded(grad + i);
                dot += own * (shift + loaded(w + i)) * along;
                stored(sum + i, loaded(sum + i) + own * along);
            }
            const float mean = added_up(dot) / float(size);
            for (long i = 0; i < size; i += LANES) {
                const Lane along = loaded(from + i) * scale;
                stored(dx + r * size + i, scale * (loaded(grad + i) * (shift + loaded(w + i)) - mean * along));
            }
        }
    });
}

template <typename T>
void turned(const T* x, const float* cos, const float* sin, T* y, long tokens, long heads, long half, long period, bool back) {
    const long size = 2 * half;
    each_rows(tokens, heads * size, [=](long, long begin, long end) {
        for (long t = begin; t < end; t++)
            for (long n = 0; n < heads; n++) {
                const T* from = x + (t * heads + n) * size;
                T* to = y + (t * heads + n) * size;
                const float *c = cos + t % period * size, *s = sin + t % period * size;
                for (long i = 0; i < half; i += LANES) {
                    const Lane a = loaded(from + i), b = loaded(from + half + i);
                    const Lane c1 = loaded(c + i), c2 = loaded(c + half + i), s1 = loaded(s + i), s2 = loaded(s + half + i);
                    stored(to + i, back ? a * c1 + b * s2 : a * c1 - b * s1);
                    stored(to + half + i, back ? b * c2 - a * s1 : b * c2 + a * s2);
                }
            }
    });
}

inline Lane sigmoid(Lane x) {
    Lane negative = -x;
    negative = negative > 88.0f ? Lane{} + 88.0f : negative;
    return 1.0f / (1.0f + exponential(negative));
}

template <typename T>
void gated(const T* gate, const T* up, T* y, long count) {
    each_rows(count / LANES, LANES, [=](long, long begin, long end) {
        for (long i = begin * LANES; i < end * LANES; i += LANES) {
            const Lane g = loaded(gate + i);
            stored(y + i, g * sigmoid(g) * loaded(up + i));
        }
    });
}

template <typename T>
void gated_back(const T* grad, const T* gate, const T* up, T* d_gate, T* d_up, long count) {
    each_rows(count / LANES, LANES, [=](long, long begin, long end) {
        for (long i = begin * LANES; i < end * LANES; i += LANES) {
            const Lane g = loaded(gate + i), s = sigmoid(g), of = loaded(grad + i);
            stored(d_up + i, of * g * s);
            stored(d_gate + i, of * loaded(up + i) * s * (1.0f + g * (1.0f - s)));
        }
    });
}

// f with numbers of the types that are named: bfloat16 where not 0, else fp32.
template <typename F>
void typed(long a, F&& f) {
    a ? f(uint16_t()) : f(float());
}

}  // namespace

// y = x / sqrt(mean(x²) + eps) · (shift + w) over rows of `size`, a multiple of 16; `scales` [rows] what x was multiplied by.
extern "C" void fw_norm_forward(const void* x, const void* w, void* y, float* scales, long x_half, long w_half, long y_half, long rows,
                                long size, float eps, float shift) {
    typed(x_half, [&](auto a) {
        typed(w_half, [&](auto b) {
            typed(y_half, [&](auto c) {
                normed((const decltype(a)*)x, (const decltype(b)*)w, (decltype(c)*)y, scales, rows, size, eps, shift);
            });
        });
    });
}

extern "C" void fw_norm_backward(const void* g, const void* x, const void* w, const float* scales, void* dx, float* sums, long x_half,
                                 long w_half, long g_half, long rows, long size, float shift) {
    typed(x_half, [&](auto a) {
        typed(w_half, [&](auto b) {
            typed(g_half, [&](auto c) {
                typedef decltype(a) X;
                normed_back((const decltype(c)*)g, (const X*)x, (const decltype(b)*)w, scales, (X*)dx, sums, rows, size, shift);
            });
        });
    });
}

// Pairs (x_i, x_{i + half}) of each head turned by the angles of its token: x, y [tokens, heads, 2 · half], cos, sin [period, 2 · half];
// `half` a multiple of 16. `back`: by the transposed matrix.
extern "C" void fw_turn(const void* x, const float* cos, const float* sin, void* y, long is_half, long tokens, long heads, long half,
                        long period, long back) {
    typed(is_half, [&](auto a) {
        turned((const decltype(a)*)x, cos, sin, (decltype(a)*)y, tokens, heads, half, period, back);
    });
}

// y = gate / (1 + e^-gate) · up, of `count` numbers, a multiple of 16.
extern "C" void fw_gate_forward(const void* gate, const void* up, void* y, long half, long count) {
    typed(half, [&](auto a) { gated((const decltype(a)*)gate, (const decltype(a)*)up, (decltype(a)*)y, count); });
}

extern "C" void fw_gate_backward(const void* grad, const void* gate, const void* up, void* d_gate, void* d_up, long half, long count) {
    typed(half, [&](auto a) {
        typedef decltype(a) T;
        gated_back((const T*)grad, (const T*)gate, (const T*)up, (T*)d_gate, (T*)d_up, count);
    });
}
