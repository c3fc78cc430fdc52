// Sixteen numbers at once, in the compiler's own vectors: registers of whatever width the processor has.
#pragma once
#include <cstdint>
#include <cstring>

#include "bf16.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;
typedef float Lane __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Bits __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uint32_t Wide __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t))));

// What a register of this processor holds. Loops that live by keeping sums in registers use these: wider vectors compilers keep in memory.
#if defined(__AVX512F__)
constexpr int NATIVE = 16;
#elif defined(__AVX__)
constexpr int NATIVE = 8;
#else
constexpr int NATIVE = 4;
#endif
typedef float Native __attribute__((vector_size(NATIVE * sizeof(float))));

static inline Native native(const float* at) {
    Native value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

static inline Lane loaded(const float* at) {
    Lane value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

static inline Lane loaded(const uint16_t* at) {
#if defined(__AVX512F__)
    return (Lane)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16);
#else
    Halves halves;
    std::memcpy(&halves, at, sizeof halves);
    return (Lane)(__builtin_convertvector(halves, Wide) << 16);
#endif
}

static inline void stored(float* at, Lane value) { std::memcpy(at, &value, sizeof value); }

// To the nearest, ties to even; not-a-number stays so.
static inline void stored(uint16_t* at, Lane value) {
    Wide bits = (Wide)value;
    Wide rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Halves halves = __builtin_convertvector(value == value ? rounded : ((bits >> 16) | 0x40), Halves);
    std::memcpy(at, &halves, sizeof halves);
}

// Those of both at these places, where the second one's begin at 16.
template <int... PLACES>
static inline Lane picked(Lane a, Lane b) {
    static_assert(sizeof...(PLACES) == LANES, "one for each number");
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, PLACES...);
#else
    const Bits places = {PLACES...};
    return __builtin_shuffle(a, b, places);
#endif
}

static inline float added_up(Lane x) {
    x += picked<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(x, x);
    x += picked<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11>(x, x);
    x += picked<2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13>(x, x);
    return x[0] + x[1];
}

static inline float largest_of(Lane x) {
    auto larger = [](Lane a, Lane b) { return a < b ? b : a; };
    x = larger(x, picked<8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7>(x, x));
    x = larger(x, picked<4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11>(x, x));
    x = larger(x, picked<2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13>(x, x));
    return x[0] < x[1] ? x[1] : x[0];
}

// e^x for x of at most 88: 2^n · 2^f with a polynomial for 2^f, |f| ≤ 1/2, right to 3e-7 of the value.
static inline Lane exponential(Lane x) {
    x *= 1.44269504f;
    x = x < -126.0f ? Lane{} - 126.0f : x;
    Lane nearest = x < 0.0f ? x - 0.5f : x + 0.5f;
    Bits whole = __builtin_convertvector(nearest, Bits);  // towards zero
    Lane f = x - __builtin_convertvector(whole, Lane);
    Lane p = 1.5403530e-4f * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    return (Lane)((Bits)p + (whole << 23));
}

// gate / (1 + e^-gate) · up.
static inline Lane gated(Lane gate, Lane up) {
    Lane negative = -gate;
    negative = negative > 88.0f ? Lane{} + 88.0f : negative;
    return gate / (1.0f + exponential(negative)) * up;
}

#if defined(__AVX512F__)
// Sixteen times sixteen words: the k-th has the k-th word of each afterwards. Four steps, each of which halves how far words are from their
// place.
static inline void turn(__m512i* a) {
    __m512i b[16];
    for (int r = 0; r < 16; r += 2) {
        b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    for (int r = 0; r < 16; r += 4)
        for (int i = 0; i < 2; i++) {
            a[r + 2 * i] = _mm512_unpacklo_epi64(b[r + i], b[r + i + 2]);
            a[r + 2 * i + 1] = _mm512_unpackhi_epi64(b[r + i], b[r + i + 2]);
        }
    for (int r = 0; r < 16; r += 8)
        for (int i = 0; i < 4; i++) {
            b[r + i] = _mm512_shuffle_i32x4(a[r + i], a[r + i + 4], 0x88);
            b[r + i + 4] = _mm512_shuffle_i32x4(a[r + i], a[r + i + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
        a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    }
}
#endif
