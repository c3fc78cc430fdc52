// What attention forward and backward share: what is computed, of what, and who sees whom.
#pragma once
#include <limits>
#include <memory>

#include "tiles.h"

namespace causal {

using namespace tiles;

constexpr long TILE = 64;  // queries, and keys
constexpr long COLUMNS = TILE / LANES;
constexpr float NONE = -std::numeric_limits<float>::infinity();

// As fw/kernels/causal.py describes it. Steps are numbers from one batch, head and position to the next.
struct Call {
    const void *q, *k, *v, *out, *grad;
    void *to, *dq, *dk, *dv;
    float* lse;               // [batch, heads, length]
    const int64_t* segments;  // [batch, length], or null: one document
    long half, batch, heads, kv_heads, length, dim, window;
    long q_step[3], k_step[3], v_step[3], out_step[3], grad_step[3], dq_step[3], dk_step[3], dv_step[3];
    float scale, softcap;

    long group() const { return heads / kv_heads; }
    long tiles() const { return (length + TILE - 1) / TILE; }
    long wide() const { return (dim + PANEL - 1) / PANEL * PANEL; }
};

template <typename T>
T* at(T* place, const long* step, long b, long head, long position) {
    return place + b * step[0] + head * step[1] + position * step[2];
}

// Memory of a thread, in pieces that begin with a line of the cache.
struct Room {
    std::unique_ptr<char[]> bytes;
    size_t there = 0, used = 0;

    void begin(size_t most) {
        if (there < most + 64) {
            bytes.reset();
            bytes.reset(new char[there = most + 64]);
        }
        used = 64 - size_t(bytes.get()) % 64;
    }

    template <typename E>
    E* take(long count) {
        E* found = (E*)(bytes.get() + used);
        used += (count * sizeof(E) + 63) / 64 * 64;
        return found;
    }
};

// This thread's, for one piece of work after another, forward and backward: as large as the largest has needed.
inline Room& own_room() {
    thread_local Room found;
    return found;
}

// Rows of a tile of queries, keys or values, of a row's batch and head; those that are not there are zeros.
template <typename T, typename E>
void rows_of(const void* place, const long* step, long b, long head, long tile, const Call& c, E* to) {
    const long first = tile * TILE, here = std::min(TILE, c.length - first);
    gather(at((const T*)place, step, b, head, first), step[2], here, c.dim, to);
    std::fill(to + here * c.dim, to + TILE * c.dim, E(0));
}

// What of a tile of keys a tile of queries sees.
struct Seen {
    bool nothing = false, all = false;

    Seen(const Call& c, long b, long queries, long keys) {
        const long q0 = queries * TILE, q1 = std::min(c.length, q0 + TILE) - 1, k0 = keys * TILE, k1 = std::min(c.length, k0 + TILE) - 1;
        nothing = k0 > q1 || (c.window > 0 && q0 - k1 >= c.window);
        all = k1 <= q0 && (c.window <= 0 || q1 - k0 < c.window);
        if (!c.segments || nothing) return;
        const int64_t* of = c.segments + b * c.length;
        const auto q = std::minmax_element(of + q0, of + q1 + 1), k = std::minmax_element(of + k0, of + k1 + 1);
        nothing = *q.first > *k.second || *k.first > *q.second;
        all = all && *q.first == *q.second && *k.first == *k.second;
    }
};

constexpr Bits COUNTED = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Which of sixteen queries from `query` on see a key: all bits set.
inline Bits sees(const Call& c, long b, long query, long key) {
    const Bits behind = COUNTED + int32_t(query - key);
    Bits found = behind >= 0;
    if (c.window > 0) found &= behind < int32_t(c.window);
    if (c.segments) {
        const int64_t *of = c.segments + b * c.length, own = of[key];
        Bits same = {};
        for (long i = 0; i < LANES && query + i < c.length; i++) same[i] = -(of[query + i] == own);
        found &= same;
    }
    return found;
}

inline Lane tanh_of(Lane x) {
    x = x > 20.0f ? Lane{} + 20.0f : x;
    x = x < -20.0f ? Lane{} - 20.0f : x;
    return 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
}

inline Lane scored(const Call& c, Lane product) {
    product *= c.scale;
    return c.softcap > 0 ? c.softcap * tanh_of(product / c.softcap) : product;
}

// Sixteen numbers, and two rows of them as what is summed over.
inline void put_lane(float* at, Lane x) { stored(at, x); }
inline void put_pair(float* at, long second, Lane x, Lane y) { stored(at, x), stored(at + second, y); }

#if defined(__AVX512BF16__)
inline __m256i halves(Lane x) { return (__m256i)_mm512_cvtneps_pbh((__m512)x); }
inline void put_lane(uint16_t* at, Lane x) { _mm256_storeu_si256((__m256i*)at, halves(x)); }
inline void put_pair(uint16_t* at, long, Lane x, Lane y) {
    const __m512i low = _mm512_cvtepu16_epi32(halves(x)), high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(y)), 16);
    _mm512_storeu_si512(at, _mm512_or_si512(low, high));
}
#endif

// Where rows `row` and the next begin in panels of TILE columns and `rows` rows, at column 16 · l.
template <typename E>
E* pair_at(E* panels, long rows, long row, long l) {
    return panels + l / 2 * rows * PANEL + row * PANEL + l % 2 * LANES * TOGETHER<E>;
}

inline long even(long count) { return (count + 1) / 2 * 2; }

}  // namespace causal
