// What stands between the products of a block, each in one pass over memory and computed in fp32.
#include <algorithm>
#include <cmath>

#include "again.h"
#include "lanes.h"
#include "pool.h"

namespace {

constexpr long PIECE = 1 << 12;  // elements that a thread takes at once

// f(begin, end) of all rows, in pieces.
template <typename F>
void each_rows(long rows, long size, F&& f) {
    const long together = std::max<long>(1, PIECE / size);
    pool::each((rows + together - 1) / together, [&](long piece) { f(piece * together, std::min(rows, (piece + 1) * together)); });
}

// y = round(x / sqrt(mean(x²) + eps)) · w of a row of `size`, a multiple of 16; shifted: x / … · (1 + w), rounded once.
void norm_row(const uint16_t* x, const uint16_t* w, uint16_t* y, long size, float eps, bool shifted) {
    Lane squares = {};
    for (long i = 0; i < size; i += LANES) {
        Lane v = loaded(x + i);
        squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(added_up(squares) / float(size) + eps);
    for (long i = 0; i < size; i += LANES) {
        Lane v = loaded(x + i) * scale;
        if (shifted) {
            stored(y + i, v * (1.0f + loaded(w + i)));
        } else {
            uint16_t rounded[LANES];
            stored(rounded, v);
            stored(y + i, loaded(rounded) * loaded(w + i));
        }
    }
}

}  // namespace

extern "C" void fw_rms_norm_bf16(const uint16_t* x, const uint16_t* w, uint16_t* y, long rows, long size, float eps, long shifted) {
    each_rows(rows, size, [=](long begin, long end) {
        for (long r = begin; r < end; r++) norm_row(x + r * size, w, y + r * size, size, eps, shifted);
    });
}

// z = x + y, and the norm of z, to the bit as one after the other.
extern "C" void fw_add_rms_norm_bf16(const uint16_t* x, const uint16_t* y, uint16_t* z, const uint16_t* w, uint16_t* normed, long rows,
                                     long size, float eps, long shifted) {
    each_rows(rows, size, [=](long begin, long end) {
        for (long r = begin; r < end; r++) {
            for (long i = r * size; i < (r + 1) * size; i += LANES) stored(z + i, loaded(x + i) + loaded(y + i));
            norm_row(z + r * size, w, normed + r * size, size, eps, shifted);
        }
    });
}

// Pairs (x_i, x_{i + half}) of each head turned by the angles of its token: x, y [tokens, heads, 2 · half], cos, sin [tokens, 2 · half].
extern "C" void fw_rotate_bf16(const uint16_t* x, const float* cos, const float* sin, uint16_t* y, long tokens, long heads, long half) {
    const long size = 2 * half;
    each_rows(tokens, heads * size, [=](long begin, long end) {
        for (long t = begin; t < end; t++)
            for (long n = 0; n < heads; n++) {
                const uint16_t* from = x + (t * heads + n) * size;
                uint16_t* to = y + (t * heads + n) * size;
                const float *c = cos + t * size, *s = sin + t * size;
                long i = 0;
                for (; i + LANES <= half; i += LANES) {
                    Lane a = loaded(from + i), b = loaded(from + half + i);
                    stored(to + i, a * loaded(c + i) - b * loaded(s + i));
                    stored(to + half + i, b * loaded(c + half + i) + a * loaded(s + half + i));
                }
                for (; i < half; i++) {
                    const float a = from_bf16(from[i]), b = from_bf16(from[half + i]);
                    to[i] = to_bf16(a * c[i] - b * s[i]);
                    to[half + i] = to_bf16(b * c[half + i] + a * s[half + i]);
                }
            }
    });
}

// y = gate / (1 + e^-gate) · up, of `count` numbers.
extern "C" void fw_silu_mul_bf16(const uint16_t* gate, const uint16_t* up, uint16_t* y, long count) {
    const long whole = count / LANES;
    each_rows(whole, LANES, [=](long begin, long end) {
        for (long l = begin * LANES; l < end * LANES; l += LANES) stored(y + l, gated(loaded(gate + l), loaded(up + l)));
    });
    for (long i = whole * LANES; i < count; i++) {
        const float g = from_bf16(gate[i]);
        y[i] = to_bf16(g / (1.0f + std::exp(-g)) * from_bf16(up[i]));
    }
}

// z = x + y, of `count` numbers.
extern "C" void fw_add_bf16(const uint16_t* x, const uint16_t* y, uint16_t* z, long count) {
    const long whole = count / LANES;
    each_rows(whole, LANES, [=](long begin, long end) {
        for (long l = begin * LANES; l < end * LANES; l += LANES) stored(z + l, loaded(x + l) + loaded(y + l));
    });
    for (long i = whole * LANES; i < count; i++) z[i] = to_bf16(from_bf16(x[i]) + from_bf16(y[i]));
}

AGAIN(fw_rms_norm_bf16)
AGAIN(fw_add_rms_norm_bf16)
AGAIN(fw_rotate_bf16)
AGAIN(fw_silu_mul_bf16)
AGAIN(fw_add_bf16)
