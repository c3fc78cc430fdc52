// Weights in panels of 32 outputs, and the layers they are of.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "pairs.h"
#include "pool.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace panels {

constexpr int PANEL = 32;
constexpr long PIECE = 1 << 17;  // bytes of weights that a thread takes at once

#if defined(__AVX512BF16__)
constexpr int MOST = 12;  // rows of a tile
#else
constexpr int MOST = 4;
#endif

// Sums of a row over a panel, or as many as there are, times `scale` and plus `bias` where these are, into y.
inline void finish(Lane low, Lane high, const float* scale, const float* bias, uint16_t* y, int columns) {
    alignas(64) float scales[PANEL], added[PANEL];
    alignas(64) uint16_t found[PANEL];
    const bool whole = columns == PANEL;
    if (!whole && scale) std::fill(std::copy_n(scale, columns, scales), scales + PANEL, 0.0f), scale = scales;
    if (!whole && bias) std::fill(std::copy_n(bias, columns, added), added + PANEL, 0.0f), bias = added;
    if (scale) low *= loaded(scale), high *= loaded(scale + LANES);
    if (bias) low += loaded(bias), high += loaded(bias + LANES);
    uint16_t* to = whole ? y : found;
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#else
    stored(to, low);
    stored(to + LANES, high);
#endif
    if (!whole) std::copy_n(found, columns, y);
}

// A layer as fw/kernels/linear.py describes it; what it has not is null.
struct Layer {
    const void* weight;
    const float* scale;
    const int32_t* sums;
    const float* bias;
    uint16_t* y;
    long outputs;
    long output_step, input_step;  // of a weight that is in no panels, between neighbours
    const float* offset;           // of groups
    const uint16_t* table;         // what codes of 4 bits stand for
    long group;                    // inputs
    long gates;                    // whether it gates what the next one gives: y is silu of it times that
};

inline const char* panel_at(const Layer& layer, long p, long panel_bytes) { return (const char*)layer.weight + p * panel_bytes; }
inline int columns_of(const Layer& layer, long p) { return int(std::min<long>(PANEL, layer.outputs - p * PANEL)); }

// As each_panel, of a layer that gates the next one. A panel's results of both stay in the cache until they are put together.
template <typename F>
void each_gated(const Layer& gate, const Layer& up, long rows, long panel_bytes, F&& f) {
    const long panels = (gate.outputs + PANEL - 1) / PANEL, together = std::max<long>(1, PIECE / 2 / panel_bytes);
    const long threads = pool::threads();
    pool::each((panels + together - 1) / together, [&](long i) {
        thread_local std::vector<uint16_t> found;
        found.resize(2 * rows * PANEL);
        uint16_t *const of_gate = found.data(), *const of_up = of_gate + rows * PANEL;
        const long end = std::min(panels, (i + 1) * together), other = (i + threads) * together;
        for (long p = i * together; p < end; p++) {
            const int columns = columns_of(gate, p);
            const long then = p + 1 < end ? p + 1 : other;
            f(gate, p, columns, panel_at(up, p, panel_bytes), of_gate, long(PANEL));
            f(up, p, columns, then < panels ? panel_at(gate, then, panel_bytes) : nullptr, of_up, long(PANEL));
            for (long r = 0; r < rows; r++)
                for (long n = 0; n < columns; n += LANES)
                    stored(gate.y + r * gate.outputs + p * PANEL + n, gated(loaded(of_gate + r * PANEL + n), loaded(of_up + r * PANEL + n)));
        }
    });
}

// f(layer, panel, its columns, the panel that this thread has next, most likely, or null, where the results of its rows begin and how far they are
// from each other) of all panels of all layers, each panel of so many bytes, in pieces.
template <typename F>
void each_panel(const Layer* layers, long count, long rows, long panel_bytes, F&& f) {
    struct Part {
        long layer, begin, end;
    };
    if (layers[0].gates) return each_gated(layers[0], layers[1], rows, panel_bytes, f);
    std::vector<Part> parts;
    const long together = std::max<long>(1, PIECE / panel_bytes);
    for (long l = 0; l < count; l++) {
        const long panels = (layers[l].outputs + PANEL - 1) / PANEL;
        for (long p = 0; p < panels; p += together) parts.push_back({l, p, std::min(panels, p + together)});
    }
    const long threads = pool::threads();
    pool::each(long(parts.size()), [&](long i) {
        const Part& part = parts[i];
        const Layer& layer = layers[part.layer];
        const Part* other = i + threads < long(parts.size()) ? &parts[i + threads] : nullptr;
        const char* next = other ? panel_at(layers[other->layer], other->begin, panel_bytes) : nullptr;
        for (long p = part.begin; p < part.end; p++)
            f(layer, p, columns_of(layer, p), p + 1 < part.end ? panel_at(layer, p + 1, panel_bytes) : next, layer.y + p * PANEL, layer.outputs);
    });
}

#if defined(__AVX512BF16__)
// Codes to bfloat16, which holds them all.
inline void widen(const int8_t* codes, long count, uint16_t* to) {
    for (long i = 0; i < count; i += 32) {
        const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(codes + i))));
        const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(codes + i + 16))));
        _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
}
#else
inline void widen(const int8_t* codes, long count, uint16_t* to) {
    for (long i = 0; i < count; i++) {
        const float value = codes[i];
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        to[i] = uint16_t(bits >> 16);  // what is cut off is 0
    }
}
#endif

}  // namespace panels

// Of grouped.cpp.
namespace grouped {

void four_bits(const uint16_t* x, const panels::Layer* layers, long count, long rows, long inputs);
void eight_bits(const uint16_t* x, const panels::Layer* layers, long count, long rows, long inputs);

}  // namespace grouped

// Of whole.cpp.
namespace whole {

void numbers(const uint16_t* x, const panels::Layer* layers, long count, long rows, long inputs);

}  // namespace whole
