// A head's keys or values of one token, as they are kept: plain numbers, or codes with their scales behind them.
#pragma once
#include <algorithm>
#include <cmath>

#include "lanes.h"

namespace rows {

// What does not fill a register is filled up with zeros.
template <typename T>
inline void widen_plain(const T* at, long dim, Lane* to) {
    long l = 0;
    for (; l < dim / LANES; l++) to[l] = loaded(at + l * LANES);
    if (dim % LANES) {
        float rest[LANES] = {};
        for (long h = 0; h < dim % LANES; h++) rest[h] = widened(at[l * LANES + h]);
        to[l] = loaded(rest);
    }
}

inline float number(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return from_bf16(bits);
}

inline float put_number(uint8_t* at, float value) {
    const uint16_t bits = to_bf16(value);
    std::memcpy(at, &bits, 2);
    return from_bf16(bits);
}

struct F32 {
    static void widen(const uint8_t* at, long dim, long, Lane* to) { widen_plain((const float*)at, dim, to); }
    static void keep(const float* x, long dim, long, uint8_t* at) { std::memcpy(at, x, dim * sizeof(float)); }
};

struct BF16 {
    static void widen(const uint8_t* at, long dim, long, Lane* to) { widen_plain((const uint16_t*)at, dim, to); }
    static void keep(const float* x, long dim, long, uint8_t* at) {
        for (long h = 0; h < dim; h++) put((uint16_t*)at + h, x[h]);
    }
};

// Codes -127 … 127, then a scale in bfloat16 for each group: a multiple of 16 numbers, or all.
struct Int8 {
    static void widen(const uint8_t* at, long dim, long group, Lane* to) {
        typedef int8_t Codes __attribute__((vector_size(LANES)));
        const uint8_t* scales = at + dim;
        long l = 0;
        for (; l < dim / LANES; l++) {
            Codes codes;
            std::memcpy(&codes, at + l * LANES, LANES);
            to[l] = __builtin_convertvector(__builtin_convertvector(codes, Bits), Lane) * number(scales + l * LANES / group * 2);
        }
        if (dim % LANES) {
            float rest[LANES] = {};
            for (long h = 0; h < dim % LANES; h++) rest[h] = float(int8_t(at[l * LANES + h])) * number(scales + l * LANES / group * 2);
            to[l] = loaded(rest);
        }
    }
    static void keep(const float* x, long dim, long group, uint8_t* at) {
        for (long g = 0; g < dim / group; g++) {
            float most = 0;
            for (long h = g * group; h < (g + 1) * group; h++) most = std::max(most, std::fabs(x[h]));
            const float scale = put_number(at + dim + 2 * g, most / 127), by = scale > 0 ? 1 / scale : 0;
            for (long h = g * group; h < (g + 1) * group; h++)
                at[h] = uint8_t(int8_t(std::min(127.0f, std::max(-127.0f, std::nearbyint(x[h] * by)))));
        }
    }
};

// Codes 0 … 15, the first half of the row in the low bits and the second in the high ones; then of each group, that divides half of the
// row, step and smallest number in bfloat16.
struct Int4 {
    static void widen(const uint8_t* at, long dim, long group, Lane* to) {
        typedef uint8_t Codes __attribute__((vector_size(LANES)));
        const long half = dim / 2;
        const uint8_t* scales = at + half;
        if (half % LANES == 0 && group % LANES == 0) {
            for (long l = 0; l < half / LANES; l++) {
                Codes codes;
                std::memcpy(&codes, at + l * LANES, LANES);
                const Bits both = __builtin_convertvector(codes, Bits);
                const uint8_t *low = scales + l * LANES / group * 4, *high = scales + (half + l * LANES) / group * 4;
                to[l] = __builtin_convertvector(both & 15, Lane) * number(low) + number(low + 2);
                to[half / LANES + l] = __builtin_convertvector(both >> 4, Lane) * number(high) + number(high + 2);
            }
            return;
        }
        float* out = (float*)to;
        for (long h = 0; h < dim; h++) {
            const int code = h < half ? at[h] & 15 : at[h - half] >> 4;
            out[h] = float(code) * number(scales + h / group * 4) + number(scales + h / group * 4 + 2);
        }
        for (long h = dim; h % LANES; h++) out[h] = 0;
    }
    static void keep(const float* x, long dim, long group, uint8_t* at) {
        const long half = dim / 2;
        std::memset(at, 0, half);
        for (long g = 0; g < dim / group; g++) {
            const auto [least, most] = std::minmax_element(x + g * group, x + (g + 1) * group);
            const float from = put_number(at + half + 4 * g + 2, *least);
            const float step = put_number(at + half + 4 * g, (*most - from) / 15), by = step > 0 ? 1 / step : 0;
            for (long h = g * group; h < (g + 1) * group; h++) {
                const int code = int(std::min(15.0f, std::max(0.0f, std::nearbyint((x[h] - from) * by))));
                at[h < half ? h : h - half] |= uint8_t(h < half ? code : code << 4);
            }
        }
    }
};

}  // namespace rows
