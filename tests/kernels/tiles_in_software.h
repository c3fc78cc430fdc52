// The tiles of AMX in memory, for processors that have AVX-512 and no AMX: what is written for them is compiled and computed there, slowly.
#pragma once
#include <immintrin.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbusd

namespace tiles_in_software {

struct Tile {
    alignas(64) uint8_t row[16][64];
    int rows, bytes;
};
inline thread_local Tile tiles[8];

inline void configure(const void* at) {
    const uint8_t* told = (const uint8_t*)at;
    for (int i = 0; i < 8; i++) {
        std::memset(tiles[i].row, 0, sizeof tiles[i].row);
        uint16_t bytes;
        std::memcpy(&bytes, told + 16 + 2 * i, 2);
        tiles[i].rows = told[48 + i], tiles[i].bytes = bytes;
    }
}

inline void release() {
    for (Tile& tile : tiles) tile.rows = tile.bytes = 0;
}

inline void load(int to, const void* at, long step) {
    std::memset(tiles[to].row, 0, sizeof tiles[to].row);
    for (int r = 0; r < tiles[to].rows; r++) std::memcpy(tiles[to].row[r], (const char*)at + r * step, tiles[to].bytes);
}

inline void store(int from, void* at, long step) {
    for (int r = 0; r < tiles[from].rows; r++) std::memcpy((char*)at + r * step, tiles[from].row[r], tiles[from].bytes);
}

// c += a · b, words of a row of a by rows of b: multiply(sums, a word everywhere, sixteen words).
template <typename F>
void add_product(int c, int a, int b, F&& multiply) {
    for (int r = 0; r < tiles[c].rows; r++) {
        __m512i sums = _mm512_load_si512(tiles[c].row[r]);
        for (int k = 0; k < tiles[a].bytes / 4; k++) {
            int32_t word;
            std::memcpy(&word, tiles[a].row[r] + 4 * k, 4);
            sums = multiply(sums, _mm512_set1_epi32(word), _mm512_load_si512(tiles[b].row[k]));
        }
        std::memcpy(tiles[c].row[r], &sums, tiles[c].bytes);
    }
}

inline void pairs(int c, int a, int b) {
    add_product(c, a, b, [](__m512i sums, __m512i of_a, __m512i of_b) {
        return (__m512i)_mm512_dpbf16_ps((__m512)sums, (__m512bh)of_a, (__m512bh)of_b);
    });
}

inline void codes(int c, int a, int b) {
    add_product(c, a, b, [](__m512i sums, __m512i of_a, __m512i of_b) { return _mm512_dpbusd_epi32(sums, of_a, of_b); });
}

}  // namespace tiles_in_software

#define _tile_loadconfig(at) tiles_in_software::configure(at)
#define _tile_release() tiles_in_software::release()
#define _tile_loadd(to, at, step) tiles_in_software::load(to, at, step)
#define _tile_stored(from, at, step) tiles_in_software::store(from, at, step)
#define _tile_zero(to) std::memset(tiles_in_software::tiles[to].row, 0, 1024)
#define _tile_dpbf16ps(c, a, b) tiles_in_software::pairs(c, a, b)
#define _tile_dpbusd(c, a, b) tiles_in_software::codes(c, a, b)
#define syscall(...) 0L  // the system lets a process use them
