// What attention to blocks is computed from, and a row's weights over a chunk of positions.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lanes.h"
#include "products.h"

namespace attention {

using namespace products;

constexpr long TILE = 64;  // query rows that share what is read
constexpr float NONE = -std::numeric_limits<float>::infinity();

struct Shape {
    long heads, kv_heads, dim, group, row_bytes, block_size, table_stride, window, sinks;
    float scale, softcap;

    long groups() const { return heads / kv_heads; }
    long lanes() const { return (dim + LANES - 1) / LANES; }
    long first_of(long position) const { return window > 0 ? std::max<long>(0, position + 1 - window) : 0; }
    long partial() const { return lanes() * LANES + LANES; }  // largest score, sum of weights, room; weighted values
};

struct Work {
    std::vector<float> q, scores, found, state;
    std::vector<Lane> keys, wide;
    std::vector<uint8_t> zeros;  // a row that is not seen
    std::vector<uint16_t> in_pairs;
};

struct Call {
    const uint8_t *keys, *values;
    const void* q;
    void* out;
    bool half;  // q and out are bfloat16
    Shape s;
};

// Tokens of one sequence, at positions from `position` on, and one head of keys and values.
struct Tile {
    const int32_t* table;
    long token, position, count, head;

    long last() const { return position + count - 1; }
};

constexpr Bits COUNTED = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Weights of a row over a chunk of `count` positions in the place of its scores; those of positions that it does not see are 0.
inline void weights_of(float* scores, long begin, long count, long first, long last, const Shape& s, float* found) {
    const int upto = int(std::min(count, last + 1 - begin)), from = int(first - begin), sinks = int(std::max<long>(0, s.sinks - begin));
    const long filled = (std::max(0, upto) + LANES - 1) / LANES * LANES;
    if (s.softcap > 0)
        for (long t = 0; t < filled; t++) scores[t] = s.softcap * std::tanh(scores[t] / s.softcap);
    const Lane none = Lane{} + NONE;
    Lane largest = none;
    for (long t = 0; t < filled; t += LANES) {
        Lane of = loaded(scores + t);
        if (t < from || t + LANES > upto) {
            const Bits at = COUNTED + int(t);
            of = (at < upto) & ((at >= from) | (at < sinks)) ? of : none;
            stored(scores + t, of);
        }
        largest = largest < of ? of : largest;
    }
    const float most = largest_of(largest);
    Lane total = {};
    for (long t = 0; t < filled; t += LANES) {
        const Lane of = loaded(scores + t);
        Lane weight = exponential(of - most);
        weight = of == none ? Lane{} : weight;
        stored(scores + t, weight);
        total += weight;
    }
    for (long t = filled; t < count; t++) scores[t] = 0;
    found[0] = most, found[1] = added_up(total);
}

// f(the first one's row in bytes, position - begin, how many) of positions from one on, those of a block at a time: they lie one behind another.
template <typename F>
inline void each_run(const Shape& s, const Tile& tile, long begin, long count, F&& f) {
    for (long t = 0, block = begin / s.block_size, inside = begin % s.block_size; t < count; block++, inside = 0) {
        const long here = std::min(count - t, s.block_size - inside);
        f(((long(tile.table[block]) * s.kv_heads + tile.head) * s.block_size + inside) * s.row_bytes, t, here);
        t += here;
    }
}

// The rows of bytes that a tile reads of the chunk that begins at `begin`: keys, values, and what comes next, padded to a multiple of `whole`.
inline void name_rows(const Call& c, const Tile& tile, long begin, long count, long whole, const uint8_t* zeros, const Tile* next,
                      long next_begin, Stream& stream) {
    // What only sinks are seen of is skipped.
    const long first = c.s.first_of(tile.position) - begin, sinks = c.s.sinks - begin, step = c.s.row_bytes;
    stream.row_bytes = step;
    stream.padded = (count + whole - 1) / whole * whole;
    const uint8_t **keys = stream.row, **values = keys + stream.padded, **after = values + stream.padded;
    std::fill_n(keys, 2 * stream.padded + AHEAD, zeros);
    each_run(c.s, tile, begin, count, [&](long place, long t, long here) {
        auto name = [&](long from, long upto) {
            for (long i = from; i < upto; i++) keys[t + i] = c.keys + place + i * step, values[t + i] = c.values + place + i * step;
        };
        const long from = std::clamp<long>(first - t, 0, here);
        name(0, std::min(from, sinks - t));
        name(from, here);
    });
    if (next)
        each_run(c.s, *next, next_begin, std::min<long>(AHEAD, next->last() + 1 - next_begin), [&](long place, long t, long here) {
            for (long i = 0; i < here; i++) after[t + i] = c.keys + place + i * step;
        });
}

// Whether no row of a tile sees any of so many positions from one on.
inline bool unseen(const Shape& s, const Tile& tile, long from, long count) {
    return from + count <= s.first_of(tile.position) && from >= s.sinks;
}

}  // namespace attention
