// Gradients of causal attention, by tiles of queries and keys.
#include <algorithm>
#include <vector>

#include "causal.h"
#include "pool.h"

using namespace causal;

namespace {

constexpr long CHUNK = 8;            // tiles of keys whose gradients are summed at a time
constexpr long KEPT_SUMS = 1 << 20;  // numbers that a thread keeps for queries, at most

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
    void compute(const Call& c, long b, const Seen& seen, const Queries<T, E>& of, long queries, const Keys<T, E>& with, long number, long keys, bool for_keys,
                 float* dq) {
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
                if (c.window > 0 && (i - begin - count) * TILE >= c.window) break;  // nor does any that follows
                std::vector<Seen> seen;
                for (long j = 0; j < count; j++) seen.emplace_back(c, b, i, begin + j);
                if (std::all_of(seen.begin(), seen.end(), [](const Seen& each) { return each.nothing; })) continue;
                queries.load(b, kv_head * group + g, i, true);
                for (long j = 0; j < count; j++)
                    pair.template compute<T>(c, b, seen[j], queries, i, keys, j, begin + j, true,
                                             dq ? dq + (g * c.tiles() + i) * size : nullptr);
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
        const Seen seen(c, b, tile, other);
        if (seen.nothing) continue;
        keys.load(b, head / c.group(), other, 1);
        pair.template compute<T>(c, b, seen, queries, tile, keys, 0, other, false, dq);
    }
    put_queries<T>(c, b, head, tile, dq, rows);
}

// With fewer heads than threads, and where sums of all of a head's queries would be many, keys and queries are gone through apart: two
// products of five twice, for no sums between threads and none to keep.
template <typename T, typename E>
void backward(const Call& c) {
    const long each = c.batch * c.kv_heads;
    const bool few = c.group() * c.tiles() * TILE * c.dim <= KEPT_SUMS;
    if (few && (each >= pool::threads() || c.tiles() == 1)) {
        pool::each(each, [&](long row) {
            Room& room = own_room();
            const Multiplying products;
            of_head<T, E>(c, row / c.kv_heads, row % c.kv_heads, room);
        });
        return;
    }
    const long chunks = (c.tiles() + CHUNK - 1) / CHUNK;
    pool::each(each * chunks, [&](long number) {
        Room& room = own_room();
        const Multiplying products;
        const long row = number % each, begin = number / each * CHUNK;
        room.begin(Queries<T, E>::bytes(c) + Keys<T, E>::bytes(c, CHUNK) + Pair<E>::bytes() + 1024);
        of_keys<T, E>(c, row / c.kv_heads, row % c.kv_heads, begin, std::min(begin + CHUNK, c.tiles()), nullptr, room);
    });
    const long rows = c.batch * c.heads;
    pool::each(rows * c.tiles(), [&](long number) {
        Room& room = own_room();
        const Multiplying products;
        const long row = number % rows;
        of_queries<T, E>(c, row / c.heads, row % c.heads, c.tiles() - 1 - number / rows, room);
    });
}

}  // namespace

extern "C" void fw_causal_backward(const Call* c) { c->half ? backward<uint16_t, Kept>(*c) : backward<float, float>(*c); }
