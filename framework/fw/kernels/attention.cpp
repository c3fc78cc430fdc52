// Tokens of several sequences over the keys and values of their blocks, wherever these are and however they are kept.
//
// Keys are taken in chunks that begin at multiples of a fixed number of positions. A token's sums over a chunk are put together with those
// of the chunks before it, in their order (Dao et al. 2023, flash-decoding). So long sequences keep all processors busy, and what a token
// gets depends neither on other sequences, nor on which tokens are computed with it, nor on how many processors there are.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "again.h"
#include "lanes.h"
#include "pool.h"
#include "rows.h"

namespace {

constexpr int CHUNK = 256, BLOCK = 32;  // positions; a block's keys stay in the nearest cache
constexpr long TILE = 64;               // query rows that share what is read
constexpr float NONE = -std::numeric_limits<float>::infinity();
// Rows whose scores are computed at once, and rows and lanes whose values are added up at once: sums stay in registers.
#if defined(__AVX512F__)
constexpr int SCORED = 8, WEIGHED = 4, TOGETHER = 4;
#else
constexpr int SCORED = 2, WEIGHED = 2, TOGETHER = 2;
#endif

struct Shape {
    long heads, kv_heads, dim, group, row_bytes, block_size, table_stride, window, sinks;
    float scale, softcap;

    long groups() const { return heads / kv_heads; }
    long lanes() const { return (dim + LANES - 1) / LANES; }
    long first_of(long position) const { return window > 0 ? std::max<long>(0, position + 1 - window) : 0; }
    long partial() const { return lanes() * LANES + LANES; }  // largest score, sum of weights, room; weighted values
};

template <int S>
inline void exchange(Lane& a, Lane& b) {
    Lane low, high;
    if constexpr (S == 8) {
        low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        high = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    } else if constexpr (S == 4) {
        low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        high = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    } else if constexpr (S == 2) {
        low = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        high = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    } else {
        low = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        high = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
    a = low, b = high;
}

template <int S>
inline void stage(Lane* rows) {
    for (int i = 0; i < LANES; i++)
        if (!(i & S)) exchange<S>(rows[i], rows[i + S]);
}

inline void transpose(Lane* rows) {
    stage<8>(rows);
    stage<4>(rows);
    stage<2>(rows);
    stage<1>(rows);
}

// f with a number of rows that the compiler knows, for all of them in tiles.
template <int MOST, typename F>
inline void tiled(long rows, F&& f) {
    long r = 0;
    for (; r + MOST <= rows; r += MOST) f(r, std::integral_constant<int, MOST>{});
    if constexpr (MOST > 1) {
        if (r < rows) tiled<MOST / 2>(rows - r, [&](long more, auto known) { f(r + more, known); });
    }
}

// Scores of BLOCK keys: q [rows, dim], keys [dim, BLOCK].
template <int ROWS>
inline void score(const float* q, long stride, const Lane* keys, long dim, float* to) {
    constexpr int WIDE = BLOCK / NATIVE;
    Native sums[ROWS][WIDE] = {};
    for (long h = 0; h < dim; h++) {
        Native key[WIDE];
        for (int i = 0; i < WIDE; i++) key[i] = native((const float*)(keys + 2 * h) + i * NATIVE);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < WIDE; i++) sums[r][i] += q[r * stride + h] * key[i];
    }
    for (int r = 0; r < ROWS; r++) std::memcpy(to + r * CHUNK, sums[r], sizeof sums[r]);
}

// out [rows, stride] += weights [rows, CHUNK] · values [count, of lanes], of N lanes from one on.
template <int ROWS, int N>
inline void weigh(const float* weights, const Lane* values, long lanes, long count, float* out, long stride) {
    constexpr int WIDE = N * LANES / NATIVE;
    Native sums[ROWS][WIDE];
    for (int r = 0; r < ROWS; r++) std::memcpy(sums[r], out + r * stride, sizeof sums[r]);
    for (long t = 0; t < count; t++) {
        Native value[WIDE];
        for (int i = 0; i < WIDE; i++) value[i] = native((const float*)(values + t * lanes) + i * NATIVE);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < WIDE; i++) sums[r][i] += weights[r * CHUNK + t] * value[i];
    }
    for (int r = 0; r < ROWS; r++) std::memcpy(out + r * stride, sums[r], sizeof sums[r]);
}

struct Work {
    std::vector<float> q, scores, found, state;
    std::vector<Lane> keys, wide;
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

void load_queries(const Call& c, const Tile& tile, std::vector<float>& q) {
    const long groups = c.s.groups(), dim = c.s.dim, stride = c.s.lanes() * LANES;
    q.assign(tile.count * groups * stride, 0.0f);
    for (long r = 0; r < tile.count * groups; r++) {
        const long from = ((tile.token + r / groups) * c.s.heads + tile.head * groups + r % groups) * dim;
        for (long h = 0; h < dim; h++)
            q[r * stride + h] = c.s.scale * (c.half ? from_bf16(((const uint16_t*)c.q)[from + h]) : ((const float*)c.q)[from + h]);
    }
}

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
        const Bits at = COUNTED + int(t);
        Lane of = loaded(scores + t);
        of = (at < upto) & ((at >= from) | (at < sinks)) ? of : none;
        stored(scores + t, of);
        largest = largest < of ? of : largest;
    }
    float most = largest[0];
    for (int l = 1; l < LANES; l++) most = std::max(most, largest[l]);
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

// Where rows of positions from one on are kept.
inline void find_places(const Shape& s, const Tile& tile, long begin, long count, long* place) {
    for (long t = 0, block = begin / s.block_size, inside = begin % s.block_size; t < count; t++) {
        place[t] = ((long(tile.table[block]) * s.kv_heads + tile.head) * s.block_size + inside) * s.row_bytes;
        if (++inside == s.block_size) inside = 0, block++;
    }
}

// What the rows of a tile get of the chunk that begins at `begin`, a part for each. `next`, if any, is the tile that this thread has next,
// most likely, from `next_begin` on.
template <typename Rows>
void attend_chunk(const Call& c, const Tile& tile, long begin, Work& work, float* found, const Tile* next_tile, long next_begin) {
    const Shape& s = c.s;
    const long groups = s.groups(), rows = tile.count * groups, lanes = s.lanes(), stride = lanes * LANES, partial = s.partial();
    const long count = std::min<long>(CHUNK, tile.last() + 1 - begin);
    const long first = s.first_of(tile.position);  // of all rows; what only sinks are seen of is skipped
    work.scores.resize(rows * CHUNK);
    work.keys.resize(2 * stride);
    work.wide.resize(BLOCK * lanes);
    for (long r = 0; r < rows; r++) std::fill_n(found + r * partial, partial, 0.0f);
    auto unseen = [&](long from) { return begin + from + BLOCK <= first && begin + from >= s.sinks; };
    long place[CHUNK], next_place[BLOCK];
    find_places(s, tile, begin, count, place);
    const long next_count = next_tile ? std::min<long>(BLOCK, next_tile->last() + 1 - next_begin) : 0;
    if (next_tile) find_places(s, *next_tile, next_begin, next_count, next_place);
    // Blocks lie anywhere, so no processor guesses what comes next. What is asked for at once beyond some dozens of lines waits, and all
    // that follows it: so it is asked for bit by bit between computing.
    auto fetch = [&](const uint8_t* kept, long from, long upto) {
        for (long t = from; t < std::min(count, upto); t++)
            for (long line = 0; line < s.row_bytes; line += 64) __builtin_prefetch(kept + place[t] + line);
    };
    auto fetch_next = [&](long from, long upto) {
        for (long t = from; t < std::min(next_count, upto); t++)
            for (long line = 0; line < s.row_bytes; line += 64) __builtin_prefetch(c.keys + next_place[t] + line);
    };
    fetch(c.keys, 0, BLOCK);
    const long squares = 2 * lanes, some = (BLOCK + squares - 1) / squares;  // tokens, with each square of numbers
    for (long from = 0; from < CHUNK; from += BLOCK) {
        const bool more = from + BLOCK < count;
        const uint8_t* next = more ? c.keys : c.values;
        const long begins = more ? from + BLOCK : from + BLOCK - (count + BLOCK - 1) / BLOCK * BLOCK;
        if (from >= count || unseen(from)) {  // masked below
            if (from < count || begins == 0) fetch(next, begins, begins + BLOCK);
            for (long r = 0; r < rows; r++) std::fill_n(work.scores.data() + r * CHUNK + from, BLOCK, 0.0f);
            continue;
        }
        for (long half = 0; half < 2; half++) {
            for (long t = 0; t < LANES; t++) {
                Lane* to = work.wide.data() + t * lanes;
                const long at = from + half * LANES + t;
                if (at < count && (begin + at >= first || begin + at < s.sinks))
                    Rows::widen(c.keys + place[at], s.dim, s.group, to);
                else
                    std::fill_n(to, lanes, Lane{});
            }
            for (long l = 0; l < lanes; l++) {
                Lane square[LANES];
                for (long t = 0; t < LANES; t++) square[t] = work.wide[t * lanes + l];
                transpose(square);
                for (long h = 0; h < LANES; h++) work.keys[2 * (l * LANES + h) + half] = square[h];
                const long at = (half * lanes + l) * some;
                fetch(next, begins + at, begins + std::min<long>(BLOCK, at + some));
            }
        }
        tiled<SCORED>(rows, [&](long r, auto known) {
            score<known>(work.q.data() + r * stride, stride, work.keys.data(), s.dim, work.scores.data() + r * CHUNK + from);
        });
    }
    for (long r = 0; r < rows; r++) {
        const long position = tile.position + r / groups;
        weights_of(work.scores.data() + r * CHUNK, begin, count, s.first_of(position), position, s, found + r * partial);
    }
    for (long from = 0; from < count; from += BLOCK) {
        if (unseen(from)) {
            fetch(c.values, from + BLOCK, from + 2 * BLOCK);
            continue;
        }
        const long here = std::min<long>(BLOCK, count - from);
        for (long t = 0; t < here; t++) {
            from + BLOCK < count ? fetch(c.values, from + BLOCK + t, from + BLOCK + t + 1) : fetch_next(t, t + 1);
            Lane* to = work.wide.data() + t * lanes;
            if (begin + from + t >= first || begin + from + t < s.sinks)
                Rows::widen(c.values + place[from + t], s.dim, s.group, to);
            else
                std::fill_n(to, lanes, Lane{});
        }
        tiled<WEIGHED>(rows, [&](long r, auto known) {
            const float* weights = work.scores.data() + r * CHUNK + from;
            float* out = found + r * partial + LANES;
            long l = 0;
            for (; l + TOGETHER <= lanes; l += TOGETHER)
                weigh<known, TOGETHER>(weights, work.wide.data() + l, lanes, here, out + l * LANES, partial);
            for (; l < lanes; l++) weigh<known, 1>(weights, work.wide.data() + l, lanes, here, out + l * LANES, partial);
        });
    }
}

// A chunk's part joins those of the chunks before it.
void join(float* state, const float* found, long partial) {
    if (found[0] == NONE) return;
    const float most = std::max(state[0], found[0]);
    const float before = state[0] == NONE ? 0 : std::exp(state[0] - most), now = std::exp(found[0] - most);
    state[0] = most;
    state[1] = before * state[1] + now * found[1];
    for (long i = LANES; i < partial; i++) state[i] = before * state[i] + now * found[i];
}

void begin_state(float* state, long partial) {
    std::fill_n(state, partial, 0.0f);
    state[0] = NONE;
}

void put_out(const Call& c, const Tile& tile, long row, const float* state) {
    const long groups = c.s.groups();
    const long to = ((tile.token + row / groups) * c.s.heads + tile.head * groups + row % groups) * c.s.dim;
    for (long h = 0; h < c.s.dim; h++) {
        const float value = state[LANES + h] / state[1];
        if (c.half)
            put((uint16_t*)c.out + to + h, value);
        else
            put((float*)c.out + to + h, value);
    }
}

bool skipped(const Shape& s, const Tile& tile, long begin) { return begin + CHUNK <= s.first_of(tile.position) && begin >= s.sinks; }

template <typename Rows>
void attend(const Call& c, const int32_t* tables, const int32_t* starts, const int32_t* lengths, long sequences) {
    const Shape& s = c.s;
    const long partial = s.partial(), groups = s.groups();
    std::vector<Tile> tiles;
    struct Part {
        long tile, begin;
    };
    std::vector<Part> parts;  // chunks of tiles with one token; of others, the tile as a whole
    std::vector<long> begins;
    const long most = std::max<long>(1, TILE / groups);
    for (long b = 0, token = 0; b < sequences; token += lengths[b++])
        for (long at = 0; at < lengths[b]; at += most)
            for (long head = 0; head < s.kv_heads; head++) {
                const Tile tile{tables + b * s.table_stride, token + at, starts[b] + at, std::min<long>(most, lengths[b] - at), head};
                begins.push_back(long(parts.size()));
                if (tile.count > 1) {
                    parts.push_back({long(tiles.size()), -1});
                } else {
                    for (long begin = 0; begin <= tile.last(); begin += CHUNK)
                        if (!skipped(s, tile, begin)) parts.push_back({long(tiles.size()), begin});
                }
                tiles.push_back(tile);
            }
    begins.push_back(long(parts.size()));
    std::vector<float> found(parts.size() * groups * partial);
    const long threads = pool::threads();
    pool::each(long(parts.size()), [&](long i) {
        thread_local Work work;
        const Tile& tile = tiles[parts[i].tile];
        load_queries(c, tile, work.q);
        if (parts[i].begin >= 0) {
            const Part* next = i + threads < long(parts.size()) ? &parts[i + threads] : nullptr;
            attend_chunk<Rows>(c, tile, parts[i].begin, work, found.data() + i * groups * partial, next ? &tiles[next->tile] : nullptr,
                               next ? std::max<long>(0, next->begin) : 0);
            return;
        }
        const long rows = tile.count * groups;
        work.found.resize(rows * partial);
        work.state.resize(rows * partial);
        for (long r = 0; r < rows; r++) begin_state(work.state.data() + r * partial, partial);
        for (long begin = 0; begin <= tile.last(); begin += CHUNK) {
            if (skipped(s, tile, begin)) continue;
            const Tile* next = begin + CHUNK <= tile.last() ? &tile : nullptr;
            attend_chunk<Rows>(c, tile, begin, work, work.found.data(), next, begin + CHUNK);
            for (long r = 0; r < rows; r++) join(work.state.data() + r * partial, work.found.data() + r * partial, partial);
        }
        for (long r = 0; r < rows; r++) put_out(c, tile, r, work.state.data() + r * partial);
    });
    std::vector<float> state(partial);
    for (long n = 0; n < long(tiles.size()); n++) {
        if (tiles[n].count > 1) continue;
        for (long g = 0; g < groups; g++) {
            begin_state(state.data(), partial);
            for (long i = begins[n]; i < begins[n + 1]; i++) join(state.data(), found.data() + (i * groups + g) * partial, partial);
            put_out(c, tiles[n], g, state.data());
        }
    }
}

template <typename Rows>
void keep(const void* x, bool half, const int64_t* slots, uint8_t* to, long tokens, long heads, long dim, long group, long row_bytes,
          long size) {
    const long together = std::max<long>(1, (1 << 13) / (heads * dim));
    pool::each((tokens + together - 1) / together, [=](long piece) {
        std::vector<float> wide(dim);
        for (long t = piece * together; t < std::min(tokens, (piece + 1) * together); t++)
            for (long k = 0; k < heads; k++) {
                const long from = (t * heads + k) * dim;
                for (long h = 0; h < dim; h++) wide[h] = half ? from_bf16(((const uint16_t*)x)[from + h]) : ((const float*)x)[from + h];
                Rows::keep(wide.data(), dim, group, to + ((slots[t] / size * heads + k) * size + slots[t] % size) * row_bytes);
            }
    });
}

// f with the way in which rows are kept, by its number.
template <typename F>
void by_kind(long kind, F&& f) {
    switch (kind) {
        case 0: return f(rows::F32{});
        case 1: return f(rows::BF16{});
        case 2: return f(rows::Int8{});
        case 3: return f(rows::Int4{});
    }
}

}  // namespace

// q, out [tokens, heads, dim], in bfloat16 where `half`, else fp32; keys, values [blocks, kv_heads, block_size, row_bytes], kept as `kind`
// says; tables [sequences, table_stride] of blocks; starts, lengths [sequences]: positions of the tokens, which lie one behind another.
// window 0: all positions, else so many up to a token's own and the first `sinks`; softcap 0: none.
extern "C" void fw_attend(const void* q, const uint8_t* keys, const uint8_t* values, const int32_t* tables, const int32_t* starts,
                          const int32_t* lengths, void* out, long half, long kind, long sequences, long heads, long kv_heads, long dim,
                          long group, long row_bytes, long block_size, long table_stride, long window, long sinks, float scale,
                          float softcap) {
    const Shape s{heads, kv_heads, dim, group, row_bytes, block_size, table_stride, window, sinks, scale, softcap};
    const Call c{keys, values, q, out, bool(half), s};
    by_kind(kind, [&](auto how) { attend<decltype(how)>(c, tables, starts, lengths, sequences); });
}

// x [tokens, heads, dim] to the slots that are named: number of the block · block_size + place in it; `kept` as keys above.
extern "C" void fw_keep(const void* x, const int64_t* slots, uint8_t* kept, long half, long kind, long tokens, long heads, long dim,
                        long group, long row_bytes, long block_size) {
    by_kind(kind, [&](auto how) { keep<decltype(how)>(x, half, slots, kept, tokens, heads, dim, group, row_bytes, block_size); });
}

AGAIN(fw_attend)
AGAIN(fw_keep)
