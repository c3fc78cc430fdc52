// Tokens of several sequences over the keys and values of their blocks, wherever these are and however they are kept.
//
// Keys are taken in chunks that begin at multiples of a fixed number of positions. A token's sums over a chunk are put together with those
// of the chunks before it, in their order (Dao et al. 2023, flash-decoding). So long sequences keep all processors busy, and what a token
// gets depends neither on other sequences, nor on which tokens are computed with it, nor on how many processors there are.
#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "again.h"
#include "attention_tiles.h"
#include "pool.h"
#include "rows.h"

using namespace attention;

namespace {

void load_queries(const Call& c, const Tile& tile, std::vector<float>& q) {
    const long groups = c.s.groups(), dim = c.s.dim, stride = c.s.lanes() * LANES;
    q.assign(tile.count * groups * stride, 0.0f);
    for (long r = 0; r < tile.count * groups; r++) {
        const long from = ((tile.token + r / groups) * c.s.heads + tile.head * groups + r % groups) * dim;
        for (long h = 0; h < dim; h++)
            q[r * stride + h] = c.s.scale * (c.half ? from_bf16(((const uint16_t*)c.q)[from + h]) : ((const float*)c.q)[from + h]);
    }
}

template <typename Rows>
bool in_pairs(const Call& c) {
    return std::is_same_v<Rows, rows::BF16> && takes(c);
}

// What the rows of a tile get of the chunk that begins at `begin`, a part for each. `next` is the tile that comes next, from `next_begin`
// on, or null.
template <typename Rows>
void attend_chunk(const Call& c, const Tile& tile, long begin, Work& work, float* found, const Tile* next, long next_begin) {
    constexpr bool KEPT = std::is_same_v<Rows, rows::BF16>, WORDS = KEPT && NATIVE == LANES;
#if defined(FW_AMX)
    if (in_pairs<Rows>(c) && amx::here) return attend_chunk_by_tiles(c, tile, begin, work, found, next, next_begin);
#endif
#if defined(__AVX512BF16__)
    if (in_pairs<Rows>(c)) return attend_chunk_by_pairs(c, tile, begin, work, found, next, next_begin);
#endif
    const Shape& s = c.s;
    const long groups = s.groups(), rows = tile.count * groups, lanes = s.lanes(), stride = lanes * LANES, partial = s.partial();
    const long count = std::min<long>(CHUNK, tile.last() + 1 - begin);
    work.scores.resize(rows * CHUNK);
    work.keys.resize(2 * stride);
    work.wide.resize(BLOCK * lanes);
    work.zeros.resize(s.row_bytes);
    for (long r = 0; r < rows; r++) std::fill_n(found + r * partial, partial, 0.0f);
    const uint8_t* zeros = work.zeros.data();
    Stream stream;
    name_rows(c, tile, begin, count, BLOCK, zeros, next, next_begin, stream);
    const uint8_t **keys = stream.row, **values = keys + stream.padded;
    auto widen = [&](const uint8_t* row, Lane* to) {
        row != zeros ? Rows::widen(row, s.dim, s.group, to) : void(std::fill_n(to, lanes, Lane{}));
    };

    stream.fetch(0, std::min<long>(AHEAD, stream.padded));
    const long some = BLOCK / std::min<long>(BLOCK, 2 * lanes);  // rows that are fetched with each square of numbers
    for (long from = 0; from < count; from += BLOCK) {
        if (unseen(s, tile, begin + from, BLOCK)) {  // masked below
            stream.fetch(from + AHEAD, BLOCK);
            for (long r = 0; r < rows; r++) std::fill_n(work.scores.data() + r * CHUNK + from, BLOCK, 0.0f);
            continue;
        }
        for (long half = 0; half < 2; half++) {
            const uint8_t** row = keys + from + half * LANES;
            auto turned = [&](long l) {
                if (const long at = (half * lanes + l) * some; at < BLOCK) stream.fetch(from + AHEAD + at, some);
            };
            if (WORDS && s.dim % (2 * LANES) == 0) {
                turn_kept(row, s.dim, work.keys.data() + half, turned);
                continue;
            }
            for (long t = 0; t < LANES; t++) widen(row[t], work.wide.data() + t * lanes);
            for (long l = 0; l < lanes; l++) {
                Lane square[LANES];
                for (long t = 0; t < LANES; t++) square[t] = work.wide[t * lanes + l];
                transpose(square);
                for (long h = 0; h < LANES; h++) work.keys[2 * (l * LANES + h) + half] = square[h];
                turned(l);
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
        const long coming = stream.padded + from + AHEAD;
        if (unseen(s, tile, begin + from, BLOCK)) {
            stream.fetch(coming, BLOCK);
            continue;
        }
        const long here = std::min<long>(BLOCK, count - from);
        const bool as_kept = KEPT && rows <= WEIGHED && s.dim % LANES == 0;
        if (!as_kept)
            for (long t = 0; t < here; t++) {
                stream.fetch(coming + t, 1);
                widen(values[from + t], work.wide.data() + t * lanes);
            }
        tiled<WEIGHED>(rows, [&](long r, auto known) {
            const float* weights = work.scores.data() + r * CHUNK + from;
            float* out = found + r * partial + LANES;
            auto of = [&](long l, auto together) {
                if (as_kept)
                    weigh_kept<known, together>(weights, values + from, stream, coming, l, here, out + l * LANES, partial);
                else
                    weigh<known, together>(weights, work.wide.data() + l, lanes, here, out + l * LANES, partial);
            };
            long l = 0;
            for (; l + TOGETHER <= lanes; l += TOGETHER) of(l, std::integral_constant<int, TOGETHER>{});
            for (; l < lanes; l++) of(l, std::integral_constant<int, 1>{});
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
    for (long h = 0; h < c.s.dim; h += LANES) {
        const Lane value = loaded(state + LANES + h) / state[1];
        alignas(64) uint8_t room[LANES * sizeof(float)];  // a head may end amid a register
        const bool whole = h + LANES <= c.s.dim;
        uint8_t* const at = (uint8_t*)c.out + (to + h) * (c.half ? sizeof(uint16_t) : sizeof(float));
        if (c.half)
            stored((uint16_t*)(whole ? at : room), value);
        else
            stored((float*)(whole ? at : room), value);
        if (!whole) std::memcpy(at, room, (c.s.dim - h) * (c.half ? sizeof(uint16_t) : sizeof(float)));
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
    // Heads lie one behind another in a block: what a processor reads beyond one, by guessing, is the next one's. So a thread takes all of
    // them in turn, where there is enough for every thread.
    const long threads = pool::threads(), together = long(parts.size()) >= 2 * threads * s.kv_heads ? s.kv_heads : 1;
    struct Task {
        long part, step;  // of the first head, and from one head to the next
    };
    std::vector<Task> tasks;
    for (long n = 0; n < long(tiles.size()); n += together)
        for (long i = begins[n]; i < begins[n + 1]; i++) tasks.push_back({i, begins[n + 1] - begins[n]});
    const std::unique_ptr<float[]> found(new float[parts.size() * groups * partial]);
    pool::each(long(tasks.size()), [&](long number) {
        thread_local Work work;
        const Task task = tasks[number];
        for (long head = 0; head < together; head++) {
            const long i = task.part + head * task.step;
            const Tile& tile = tiles[parts[i].tile];
            if (!in_pairs<Rows>(c)) load_queries(c, tile, work.q);
            if (parts[i].begin >= 0) {
                const long then = number + threads;
                const Part* next = head + 1 < together           ? &parts[i + task.step]
                                   : then < long(tasks.size()) ? &parts[tasks[then].part]
                                                                 : nullptr;
                float* const its = found.get() + i * groups * partial;
                attend_chunk<Rows>(c, tile, parts[i].begin, work, its, next ? &tiles[next->tile] : nullptr,
                                   next ? std::max<long>(0, next->begin) : 0);
                for (long g = 0; g < groups && task.step == 1; g++) put_out(c, tile, g, its + g * partial);  // nothing joins it
                continue;
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
        }
    });
    std::vector<float> state(partial);
    for (long n = 0; n < long(tiles.size()); n++) {
        if (tiles[n].count > 1 || begins[n + 1] - begins[n] == 1) continue;
        for (long g = 0; g < groups; g++) {
            begin_state(state.data(), partial);
            for (long i = begins[n]; i < begins[n + 1]; i++) join(state.data(), found.get() + (i * groups + g) * partial, partial);
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
                uint8_t* const row = to + ((slots[t] / size * heads + k) * size + slots[t] % size) * row_bytes;
                if (std::is_same_v<Rows, rows::BF16> && half) {
                    std::memcpy(row, (const uint16_t*)x + from, dim * sizeof(uint16_t));
                    continue;
                }
                for (long h = 0; h < dim; h++) wide[h] = half ? from_bf16(((const uint16_t*)x)[from + h]) : ((const float*)x)[from + h];
                Rows::keep(wide.data(), dim, group, row);
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
