// Causal attention of whole sequences, forward and backward, a tile of queries and keys at a time: no scores in memory (Dao 2023,
// FlashAttention-2, https://arxiv.org/abs/2307.08691).
//
// Tiles are computed with queries as columns: what a softmax sums over are then rows, and both of its results are rows and panels of the
// next products as they lie.
#include "causal.h"

#include <cmath>

#include "pool.h"

using namespace causal;

namespace {

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
        const Multiplying products;
        const long row = number % each;  // the longest first
        forward_tile<T, E>(c, row / c.kv_heads, row % c.kv_heads, c.tiles() - 1 - number / each, own_room());
    });
}

}  // namespace

extern "C" void fw_causal_forward(const Call* c) { c->half ? forward<uint16_t, Kept>(*c) : forward<float, float>(*c); }
