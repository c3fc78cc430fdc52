// bfloat16 as its 16 bits.
#pragma once
#include <cstdint>
#include <cstring>

static inline float from_bf16(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

// To the nearest, ties to even; not-a-number stays so.
static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float widened(float value) { return value; }
static inline float widened(uint16_t value) { return from_bf16(value); }
static inline void put(float* at, float value) { *at = value; }
static inline void put(uint16_t* at, float value) { *at = to_bf16(value); }
