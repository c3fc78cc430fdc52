// The same by tiles of AMX: keys are multiplied as they lie, sixteen positions by up to sixteen queries.
#pragma once
#include <algorithm>
#include <cstring>

#include "amx.h"
#include "attention_pairs.h"

namespace attention {

#if defined(FW_AMX)

constexpr long SIDE = amx::SIDE, GROUP = 4 * SIDE;  // positions whose scores are computed at once
static_assert(SIDE == LANES, "a tile is a square of registers");

// Queries of a tile, sixteen at a time as columns: [⌈rows/16⌉, dim/32, 16, 16, 2]; those that are not there are zeros.
inline void queries_as_columns(const Call& c, const Tile& tile, uint16_t* to) {
    const long dim = c.s.dim, rows = tile.count * c.s.groups();
    for (long begin = 0; begin < rows; begin += SIDE)
        for (long h = 0; h < dim; h += PAIRED, to += SQUARE) {
            __m512i square[SIDE];
            for (long i = 0; i < SIDE; i++)
                square[i] = begin + i < rows ? _mm512_loadu_si512(query_of(c, tile, begin + i) + h) : _mm512_setzero_si512();
            turn(square);
            for (long i = 0; i < SIDE; i++) _mm512_store_si512(to + i * PAIRED, square[i]);
        }
}

// Where sixteen rows lie one behind another: in the cache, or copied.
inline const char* together(const uint8_t* const* rows, long bytes, char* copy) {
    bool as_they_lie = true;
    for (long i = 1; i < SIDE; i++) as_they_lie &= rows[i] == rows[0] + i * bytes;
    if (as_they_lie) return (const char*)rows[0];
    for (long i = 0; i < SIDE; i++) std::memcpy(copy + i * bytes, rows[i], bytes);
    return copy;
}

// Queries up to which their scores lie one position's behind another's.
constexpr long FEW_QUERIES = 4;

// Of sixteen positions' scores by query, which lie so far `apart`, those of some queries by position, times `scale`.
inline void scores_by_query(const float* found, long apart, long queries, float scale, float* to) {
    const __m512 by = _mm512_set1_ps(scale);
    if (apart == FEW_QUERIES) {
        const __m512 at[4] = {_mm512_load_ps(found), _mm512_load_ps(found + 16), _mm512_load_ps(found + 32), _mm512_load_ps(found + 48)};
        for (int q = 0; q < queries; q += 2) {
            // Eight positions of two queries.
            const __m512i of_first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
            const __m512i two = _mm512_add_epi32(of_first, _mm512_set1_epi32(q));
            const __m512 first = _mm512_permutex2var_ps(at[0], two, at[1]), second = _mm512_permutex2var_ps(at[2], two, at[3]);
            _mm512_storeu_ps(to + q * CHUNK, _mm512_mul_ps(_mm512_shuffle_f32x4(first, second, 0x44), by));
            if (q + 1 < queries) _mm512_storeu_ps(to + (q + 1) * CHUNK, _mm512_mul_ps(_mm512_shuffle_f32x4(first, second, 0xee), by));
        }
        return;
    }
    __m512i square[SIDE];
    for (long i = 0; i < SIDE; i++) square[i] = _mm512_load_si512(found + i * SIDE);
    turn(square);
    for (long q = 0; q < queries; q++) _mm512_storeu_ps(to + q * CHUNK, _mm512_mul_ps((__m512)square[q], by));
}

inline void multiply(int sum) {
    switch (sum) {
        case 0: _tile_dpbf16ps(0, 4, 6); break;
        case 1: _tile_dpbf16ps(1, 4, 6); break;
        case 2: _tile_dpbf16ps(2, 4, 6); break;
        default: _tile_dpbf16ps(3, 4, 6);
    }
}

// As attend_chunk of attention.cpp, of rows in bfloat16.
inline void attend_chunk_by_tiles(const Call& c, const Tile& tile, long begin, Work& work, float* found, const Tile* next, long next_begin) {
    const Shape& s = c.s;
    const long groups = s.groups(), rows = tile.count * groups, dim = s.dim, partial = s.partial();
    const long count = std::min<long>(CHUNK, tile.last() + 1 - begin), padded = (count + PAIRED - 1) / PAIRED * PAIRED;
    const long row_tiles = (rows + SIDE - 1) / SIDE, widths = dim / PAIRED;
    work.scores.resize(rows * CHUNK);
    work.zeros.resize(s.row_bytes);
    // Queries, weights [rows, CHUNK], values in pairs, sixteen keys for each of four, and their scores.
    const long of_queries = row_tiles * widths * SQUARE, of_weights = row_tiles * SIDE * CHUNK, of_values = CHUNK * dim, of_keys = GROUP * dim;
    uint16_t* const queries = room_for(of_queries + of_weights + of_values + of_keys + 2 * GROUP * SIDE, work);
    uint16_t *const weights = queries + of_queries, *const values = weights + of_weights, *const copies = values + of_values;
    float* const sums = (float*)(copies + of_keys);

    Stream stream;
    name_rows(c, tile, begin, count, GROUP, work.zeros.data(), next, next_begin, stream);
    const uint8_t **key = stream.row, **value = key + stream.padded;
    queries_as_columns(c, tile, queries);
    const long columns = std::min(rows, SIDE) * long(sizeof(float)), apart = rows <= FEW_QUERIES ? FEW_QUERIES : SIDE;
    amx::Tiles tiles({SIDE, SIDE, SIDE, SIDE, SIDE, 0, SIDE, 0}, {columns, columns, columns, columns, 0, 0, columns, 0});
    stream.fetch(0, std::min<long>(AHEAD, stream.padded));
    for (long from = 0; from < count; from += GROUP) {
        if (unseen(s, tile, begin + from, GROUP)) {  // masked below
            stream.fetch(from + AHEAD, GROUP);
            for (long r = 0; r < rows; r++) std::fill_n(work.scores.data() + r * CHUNK + from, GROUP, 0.0f);
            continue;
        }
        const long blocks = std::min<long>(4, (count - from + SIDE - 1) / SIDE);
        const char* at[4];
        for (long b = 0; b < blocks; b++) at[b] = together(key + from + b * SIDE, s.row_bytes, (char*)(copies + b * SIDE * dim));
        amx::settle();
        for (long t = 0; t < row_tiles; t++) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (long w = 0; w < widths; w++) {
                _tile_loadd(6, queries + (t * widths + w) * SQUARE, 64);
                for (long b = 0; b < 4; b++) {
                    if (t == 0) stream.fetch(from + AHEAD + (w * 4 + b) * SIDE / widths, SIDE / widths);
                    if (b >= blocks) continue;
                    _tile_loadd(4, at[b] + w * 64, s.row_bytes);
                    multiply(int(b));
                }
            }
            _tile_stored(0, sums, apart * sizeof(float));
            _tile_stored(1, sums + SIDE * SIDE, apart * sizeof(float));
            _tile_stored(2, sums + 2 * SIDE * SIDE, apart * sizeof(float));
            _tile_stored(3, sums + 3 * SIDE * SIDE, apart * sizeof(float));
            amx::settle();
            const long here = std::min(SIDE, rows - t * SIDE);
            for (long b = 0; b < blocks; b++)
                scores_by_query(sums + b * SIDE * SIDE, apart, here, s.scale, work.scores.data() + t * SIDE * CHUNK + from + b * SIDE);
        }
    }
    round_weights(tile, begin, count, padded, s, work, weights, found);
    for (long from = 0; from < padded; from += PAIRED) {
        stream.fetch(stream.padded + from + AHEAD, PAIRED);
        if (!unseen(s, tile, begin + from, PAIRED)) values_in_pairs(value + from, dim, values + from * dim);
    }
    const long least = std::min(rows, SIDE);  // of rows that are multiplied at once
    tiles.shape({least, least, least, least, least, 0, SIDE, 0}, {});
    for (long t = 0; t < row_tiles; t++)
        for (long h = 0; h < dim; h += 4 * SIDE) {
            const int wide = int(std::min<long>(4, (dim - h) / SIDE));
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (long from = 0; from < padded; from += PAIRED) {
                if (unseen(s, tile, begin + from, PAIRED)) continue;
                _tile_loadd(4, weights + t * SIDE * CHUNK + from, CHUNK * 2);
                for (int i = 0; i < wide; i++) {
                    _tile_loadd(6, values + from * dim + (h / SIDE + i) * SQUARE, 64);
                    multiply(i);
                }
            }
            _tile_stored(0, sums, 256);
            _tile_stored(1, sums + SIDE, 256);
            _tile_stored(2, sums + 2 * SIDE, 256);
            _tile_stored(3, sums + 3 * SIDE, 256);
            amx::settle();
            for (long r = 0; r < std::min(SIDE, rows - t * SIDE); r++) {
                float *of = sums + r * 4 * SIDE, *to = found + (t * SIDE + r) * partial + LANES + h;
                for (int i = 0; i < wide; i += 2) {
                    __m512 low = _mm512_loadu_ps(of + i * SIDE), high = _mm512_loadu_ps(of + (i + 1) * SIDE);
                    in_order(low, high);
                    _mm512_storeu_ps(to + i * SIDE, low);
                    _mm512_storeu_ps(to + (i + 1) * SIDE, high);
                }
            }
        }
}

#endif

}  // namespace attention
