// Pairs of neighbours in bfloat16, which AVX-512 multiplies and adds to a sum at once (vdpbf16ps).
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>

static inline __m512bh pairs(const uint16_t* at) { return (__m512bh)_mm512_loadu_si512(at); }

static inline __m512bh pairs(const int8_t* at) {
    const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
    const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(at + 16))));
    return _mm512_cvtne2ps_pbh(second, first);
}

static inline __m512bh repeated(const uint16_t* at) {
    int32_t pair;
    std::memcpy(&pair, at, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}
#endif
