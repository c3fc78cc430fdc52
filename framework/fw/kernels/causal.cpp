// Causal attention of whole sequences, forward and backward, a tile of queries and keys at a time: no scores in memory (Dao 2023,
// FlashAttention-2, https://arxiv.org/abs/2307.08691).
//
// Tiles are computed with queries as columns: what a softmax sums over are then rows, and both of its results are rows and panels of the
// next products as they lie.
#include <cmath>
#include <limits>
#include <vector>

#include "pool.h"
#include "tiles.h"

using namespace tiles;

namespace {

constexpr long TILE = 64;  // queries, and keys
constexpr long CHUNK = 8;  // tiles of keys whose gradients are summed at a time
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
    std::vector<char> bytes;
    size_t used = 0;

    void begin(size_t most) {
        if (bytes.size() < most + 64) bytes.resize(most + 64);
        used = 64 - size_t(bytes.data()) % 64;
    }

    template <typename E>
    E* take(long count) {
        E* found = (E*)(bytes.data() + used);
        used += (count * sizeof(E) + 63) / 64 * 64;
        return found;
    }
};

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

long even(long count) { return (count + 1) / 2 * 2; }

// A tile of queries after all of its keys: rows of results, and the logarithm of each row's sum.
template <typename T>
void put_out(const Call& c, long b, long head, long tile, const float* weighted, const float* most, const float* sums, float* rows) {
    const long first = tile * TILE, here = std::min(TILE, c.length - first);
    turned((const int32_t*)weighted, TILE, c.dim, TILE, (int32_t*)rows, c.dim);
    for (long i = 0; i < here; i++) {
        const float by = 1.0f / sums[i];
        for (long h = 0; h < c.dim; h++) rows[i * c.dim + h] *= by;
        converted(rows + i * c.dim, at((T*)c.to, c.out_step, b, head, first + i), c.dim);
        c.lse[(b * c.heads + head) * c.length + first + i] = most[i] + std::log(sums[i]);
    }
}

template <typename T, typename E>
void forward_tile(const Call& c, long b, long kv_head, long tile, Room& room) {
    const long group = c.group(), size = TILE * c.dim;
    room.begin((group + 3) * (size * sizeof(E) + 64) + (group + 1) * (size * sizeof(float) + 64) + 3 * TILE * TILE * sizeof(float) +
               2 * group * TILE * sizeof(float) + 1024);
    E *queries = room.take<E>(group * size), *rows = room.take<E>(size), *keys = room.take<E>(size), *values = room.take<E>(size);
    E* weights = room.take<E>(TILE * TILE);
    float *scores = room.take<float>(TILE * TILE), *weighted = room.take<float>(group * size), *out = room.take<float>(size);
    float *most = room.take<float>(group * TILE), *sums = room.take<float>(group * TILE);
    for (long g = 0; g < group; g++) {
        rows_of<T>(c.q, c.q_step, b, kv_head * group + g, tile, c, rows);
        panels_of_columns(rows, TILE, c.dim, queries + g * size);
    }
    std::fill_n(weighted, group * size, 0.0f);
    std::fill_n(most, group * TILE, -1e30f);
    std::fill_n(sums, group * TILE, 0.0f);
    for (long other = 0; other <= tile; other++) {
        const Seen seen(c, b, tile, other);
        if (seen.nothing) continue;
        const long here = std::min(TILE, c.length - other * TILE);
        rows_of<T>(c.k, c.k_step, b, kv_head, other, c, keys);
        rows_of<T>(c.v, c.v_step, b, kv_head, other, c, rows);
        turned_rows(rows, here, c.dim, TILE, values);
        for (long g = 0; g < group; g++) {
            multiplied<false>(keys, c.dim, queries + g * size, 2, scores, TILE, here, c.dim);
            for (long l = 0; l < COLUMNS; l++) {
                float *most_l = most + g * TILE + l * LANES, *sums_l = sums + g * TILE + l * LANES;
                const Lane before = loaded(most_l);
                Lane largest = before;
                for (long k = 0; k < here; k++) {
                    float* score = scores + k * TILE + l * LANES;
                    Lane of = scored(c, loaded(score));
                    if (!seen.all) of = sees(c, b, tile * TILE + l * LANES, other * TILE + k) ? of : Lane{} + NONE;
                    stored(score, of);
                    largest = largest < of ? of : largest;
                }
                Lane total = {};
                auto weight = [&](long k) {
                    const Lane of = loaded(scores + k * TILE + l * LANES), found = exponential(of - largest);
                    return of == Lane{} + NONE ? Lane{} : found;
                };
                for (long k = 0; k < here; k += 2) {
                    const Lane first = weight(k), second = k + 1 < here ? weight(k + 1) : Lane{};
                    total += first + second;
                    put_pair(pair_at(weights, even(here), k, l), PANEL, first, second);
                }
                const Lane shrunk = exponential(before - largest);
                stored(most_l, largest);
                stored(sums_l, loaded(sums_l) * shrunk + total);
                float* of = weighted + g * size + l * LANES;
                for (long h = 0; h < c.dim; h++) stored(of + h * TILE, loaded(of + h * TILE) * shrunk);
            }
            multiplied<true>(values, TILE, weights, 2, weighted + g * size, TILE, c.dim, even(here));
        }
    }
    for (long g = 0; g < group; g++)
        put_out<T>(c, b, kv_head * group + g, tile, weighted + g * size, most + g * TILE, sums + g * TILE, out);
}

template <typename T, typename E>
void forward(const Call& c) {
    const long each = c.batch * c.kv_heads;
    pool::each(each * c.tiles(), [&](long number) {
        thread_local Room room;
        const long row = number % each;  // the longest first
        forward_tile<T, E>(c, row / c.kv_heads, row % c.kv_heads, c.tiles() - 1 - number / each, room);
    });
}

// A tile of queries of one head as backward needs it.
template <typename T, typename E>
struct Queries {
    const Call& c;
    E *rows, *q_columns, *grad_columns, *q_rows, *grad_rows;
    float *lse, *delta;

    static size_t bytes(const Call& c) { return 5 * (TILE * c.wide() * sizeof(E) + 64) + 2 * (TILE * sizeof(float) + 64); }

    Queries(const Call& c, Room& room) : c(c) {
        for (E** each : {&rows, &q_columns, &grad_columns, &q_rows, &grad_rows}) *each = room.take<E>(TILE * c.wide());
        lse = room.take<float>(TILE), delta = room.take<float>(TILE);
    }

    void load(long b, long head, long tile, bool for_keys) {
        const long first = tile * TILE, here = std::min(TILE, c.length - first);
        rows_of<T>(c.q, c.q_step, b, head, tile, c, rows);
        panels_of_columns(rows, TILE, c.dim, q_columns);
        if (for_keys) panels_of_rows(rows, TILE, c.dim, q_rows);
        rows_of<T>(c.grad, c.grad_step, b, head, tile, c, rows);
        panels_of_columns(rows, TILE, c.dim, grad_columns);
        if (for_keys) panels_of_rows(rows, TILE, c.dim, grad_rows);
        std::fill_n(lse, TILE, 0.0f);
        std::fill_n(delta, TILE, 0.0f);
        for (long i = 0; i < here; i++) {
            const T *grad = at((const T*)c.grad, c.grad_step, b, head, first + i), *out = at((const T*)c.out, c.out_step, b, head, first + i);
            Lane sum = {};
            for (long h = 0; h < c.dim; h += LANES) sum += loaded(grad + h) * loaded(out + h);
            delta[i] = added_up(sum);
            lse[i] = c.lse[(b * c.heads + head) * c.length + first + i];
        }
    }
};

// Tiles of keys of one head, and their gradients.
template <typename T, typename E>
struct Keys {
    const Call& c;
    E *keys, *values, *turned;
    float *dk, *dv;

    static size_t bytes(const Call& c, long tiles) {
        return tiles * TILE * (3 * c.dim * sizeof(E) + 2 * c.wide() * sizeof(float)) + 5 * 64;
    }

    Keys(const Call& c, long tiles, Room& room) : c(c) {
        keys = room.take<E>(tiles * TILE * c.dim), values = room.take<E>(tiles * TILE * c.dim), turned = room.take<E>(tiles * TILE * c.dim);
        dk = room.take<float>(tiles * TILE * c.wide()), dv = room.take<float>(tiles * TILE * c.wide());
    }

    void load(long b, long head, long first, long count) {
        for (long j = 0; j < count; j++) {
            const long size = TILE * c.dim;
            rows_of<T>(c.k, c.k_step, b, head, first + j, c, keys + j * size);
            rows_of<T>(c.v, c.v_step, b, head, first + j, c, values + j * size);
            turned_rows(keys + j * size, TILE, c.dim, TILE, turned + j * size);
        }
        std::fill_n(dk, count * TILE * c.wide(), 0.0f);
        std::fill_n(dv, count * TILE * c.wide(), 0.0f);
    }

    void put(long b, long head, long first, long count) {
        for (long r = 0; r < std::min(count * TILE, c.length - first * TILE); r++) {
            for (long h = 0; h < c.dim; h++) dk[r * c.wide() + h] *= c.scale;
            converted(dk + r * c.wide(), at((T*)c.dk, c.dk_step, b, head, first * TILE + r), c.dim);
            converted(dv + r * c.wide(), at((T*)c.dv, c.dv_step, b, head, first * TILE + r), c.dim);
        }
    }
};

// What a tile of queries and a tile of keys give one another: sums of gradients of the keys, where asked for, and of the queries.
template <typename E>
struct Pair {
    float *scores, *slopes;
    E *weights, *gradients, *panels;

    static size_t bytes() { return 5 * (TILE * TILE * sizeof(float) + 64); }

    explicit Pair(Room& room) {
        scores = room.take<float>(TILE * TILE), slopes = room.take<float>(TILE * TILE);
        weights = room.take<E>(TILE * TILE), gradients = room.take<E>(TILE * TILE), panels = room.take<E>(TILE * TILE);
    }

    template <typename T>
    void compute(const Call& c, long b, const Queries<T, E>& of, long queries, const Keys<T, E>& with, long number, long keys, bool for_keys,
                 float* dq) {
        const Seen seen(c, b, queries, keys);
        if (seen.nothing) return;
        const long here = std::min(TILE, c.length - keys * TILE), size = TILE * c.dim;
        multiplied<false>(with.keys + number * size, c.dim, of.q_columns, 2, scores, TILE, here, c.dim);
        multiplied<false>(with.values + number * size, c.dim, of.grad_columns, 2, slopes, TILE, here, c.dim);
        for (long l = 0; l < COLUMNS; l++) {
            const Lane lse = loaded(of.lse + l * LANES), delta = loaded(of.delta + l * LANES);
            auto row = [&](long k) {
                if (k >= here) return Lane{};
                const long place = k * TILE + l * LANES;
                const Lane score = scored(c, loaded(scores + place));
                Lane weight = exponential(score - lse);
                if (!seen.all) weight = sees(c, b, queries * TILE + l * LANES, keys * TILE + k) ? weight : Lane{};
                Lane gradient = weight * (loaded(slopes + place) - delta);
                if (c.softcap > 0) gradient *= 1.0f - score * score / (c.softcap * c.softcap);
                if (for_keys) put_lane(weights + place, weight), put_lane(gradients + place, gradient);
                return gradient;
            };
            for (long k = 0; k < here; k += 2) {
                const Lane first = row(k), second = row(k + 1);
                if (dq) put_pair(pair_at(panels, even(here), k, l), PANEL, first, second);
            }
        }
        if (for_keys) {
            const long wide = c.wide(), columns = wide / PANEL;
            multiplied<true>(weights, TILE, of.grad_rows, columns, with.dv + number * TILE * wide, wide, here, TILE);
            multiplied<true>(gradients, TILE, of.q_rows, columns, with.dk + number * TILE * wide, wide, here, TILE);
        }
        if (dq) multiplied<true>(with.turned + number * size, TILE, panels, 2, dq, TILE, c.dim, even(here));
    }
};

// Gradients of a tile of queries, from sums that lie turned.
template <typename T>
void put_queries(const Call& c, long b, long head, long tile, const float* sums, float* rows) {
    const long first = tile * TILE, here = std::min(TILE, c.length - first);
    turned((const int32_t*)sums, TILE, c.dim, TILE, (int32_t*)rows, c.dim);
    for (long i = 0; i < here; i++) {
        for (long h = 0; h < c.dim; h++) rows[i * c.dim + h] *= c.scale;
        converted(rows + i * c.dim, at((T*)c.dq, c.dq_step, b, head, first + i), c.dim);
    }
}

// Gradients of one head's keys and values in tiles from `first` to `end`, and what these add to those of queries, where asked for:
// [group, tiles, dim, TILE].
template <typename T, typename E>
void of_keys(const Call& c, long b, long kv_head, long first, long end, float* dq, Room& room) {
    const long group = c.group(), size = TILE * c.dim;
    Queries<T, E> queries(c, room);
    Keys<T, E> keys(c, CHUNK, room);
    Pair<E> pair(room);
    for (long begin = first; begin < end; begin += CHUNK) {
        const long count = std::min(CHUNK, end - begin);
        keys.load(b, kv_head, begin, count);
        for (long g = 0; g < group; g++)
            for (long i = begin; i < c.tiles(); i++) {
                queries.load(b, kv_head * group + g, i, true);
                for (long j = 0; j < count && begin + j <= i; j++)
                    pair.template compute<T>(c, b, queries, i, keys, j, begin + j, true, dq ? dq + (g * c.tiles() + i) * size : nullptr);
            }
        keys.put(b, kv_head, begin, count);
    }
}

// All of one head's keys and of its queries: sums of all queries are kept meanwhile.
template <typename T, typename E>
void of_head(const Call& c, long b, long kv_head, Room& room) {
    const long group = c.group(), size = TILE * c.dim, all = group * c.tiles();
    room.begin(Queries<T, E>::bytes(c) + Keys<T, E>::bytes(c, CHUNK) + Pair<E>::bytes() + ((all + 1) * size + 64) * sizeof(float) + 1024);
    float *dq = room.take<float>(all * size), *rows = room.take<float>(size);
    std::fill_n(dq, all * size, 0.0f);
    of_keys<T, E>(c, b, kv_head, 0, c.tiles(), dq, room);
    for (long n = 0; n < all; n++) put_queries<T>(c, b, kv_head * group + n / c.tiles(), n % c.tiles(), dq + n * size, rows);
}

template <typename T, typename E>
void of_queries(const Call& c, long b, long head, long tile, Room& room) {
    const long size = TILE * c.dim;
    room.begin(Queries<T, E>::bytes(c) + Keys<T, E>::bytes(c, 1) + Pair<E>::bytes() + 2 * (size + 64) * sizeof(float) + 1024);
    float *dq = room.take<float>(size), *rows = room.take<float>(size);
    std::fill_n(dq, size, 0.0f);
    Queries<T, E> queries(c, room);
    Keys<T, E> keys(c, 1, room);
    Pair<E> pair(room);
    queries.load(b, head, tile, false);
    for (long other = 0; other <= tile; other++) {
        if (Seen(c, b, tile, other).nothing) continue;
        keys.load(b, head / c.group(), other, 1);
        pair.template compute<T>(c, b, queries, tile, keys, 0, other, false, dq);
    }
    put_queries<T>(c, b, head, tile, dq, rows);
}

// With fewer heads than threads, keys and queries are gone through apart: two of seven products twice, for no sums between threads.
template <typename T, typename E>
void backward(const Call& c) {
    const long each = c.batch * c.kv_heads;
    if (each >= pool::threads() || c.tiles() == 1) {
        pool::each(each, [&](long row) {
            thread_local Room room;
            of_head<T, E>(c, row / c.kv_heads, row % c.kv_heads, room);
        });
        return;
    }
    const long chunks = (c.tiles() + CHUNK - 1) / CHUNK;
    pool::each(each * chunks, [&](long number) {
        thread_local Room room;
        const long row = number % each, begin = number / each * CHUNK;
        room.begin(Queries<T, E>::bytes(c) + Keys<T, E>::bytes(c, CHUNK) + Pair<E>::bytes() + 1024);
        of_keys<T, E>(c, row / c.kv_heads, row % c.kv_heads, begin, std::min(begin + CHUNK, c.tiles()), nullptr, room);
    });
    const long rows = c.batch * c.heads;
    pool::each(rows * c.tiles(), [&](long number) {
        thread_local Room room;
        const long row = number % rows;
        of_queries<T, E>(c, row / c.heads, row % c.heads, c.tiles() - 1 - number / rows, room);
    });
}

}  // namespace

extern "C" void fw_causal_forward(const Call* c) { c->half ? forward<uint16_t, Kept>(*c) : forward<float, float>(*c); }

extern "C" void fw_causal_backward(const Call* c) { c->half ? backward<uint16_t, Kept>(*c) : backward<float, float>(*c); }
