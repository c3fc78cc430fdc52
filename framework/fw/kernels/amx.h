// Products by the tiles of Intel's AMX: registers of sixteen rows of 64 bytes, of bfloat16 in pairs or of codes of 8 bits in fours.
//
// What lies in panels of 32 columns is multiplied as it lies: sixteen rows of a panel are two such tiles side by side. Each sum is taken in the
// same order whatever the number of rows.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "lanes.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__linux__)
#define FW_AMX 1
#endif

namespace amx {

#if defined(FW_AMX)

constexpr long SIDE = 16, ROWS = 2 * SIDE;  // of a tile, and of what is multiplied at once
constexpr long WORD = 4, TILE_BYTES = 64, PANEL_BYTES = 128;  // a word is what a sum takes at once

// Whether the system lets this process use them: it is asked once, for a thread's state grows by eight KiB.
extern const bool here;

// What instructions read through an address is written before, and what they have written is read after; compilers are not told by themselves.
inline void settle() { asm volatile("" ::: "memory"); }

// Until it goes, this thread's tiles: 0 to 3 for sums, of the first sixteen rows and of the next, 4 and 5 for these rows, 6 and 7 for a panel.
class Tiles {
public:
    explicit Tiles(long rows = ROWS) { shape(rows); }
    Tiles(const std::array<long, 8>& rows, const std::array<long, 8>& bytes) { shape(rows, bytes); }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    // So many rows are multiplied from now on.
    void shape(long rows) {
        const long first = std::min(rows, SIDE), second = rows - first;
        shape({first, first, second, second, first, second, SIDE, SIDE}, {});
    }

    // Rows of each, and how many bytes they have where these are less than a whole row's.
    void shape(const std::array<long, 8>& rows, const std::array<long, 8>& bytes) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } all;
        for (int i = 0; i < 8; i++) all.rows[i] = uint8_t(rows[i]), all.bytes[i] = uint16_t(!rows[i] ? 0 : bytes[i] ? bytes[i] : TILE_BYTES);
        settle();
        _tile_loadconfig(&all);
        settle();
    }
};

enum class Of { BF16, CODES };  // codes: of rows without a sign, of panels with one

template <Of OF, bool SECOND>
inline void step(const char* a, long a_step, const char* panel) {
    _tile_loadd(6, panel, PANEL_BYTES);
    _tile_loadd(4, a, a_step);
    _tile_loadd(7, panel + TILE_BYTES, PANEL_BYTES);
    if constexpr (SECOND) _tile_loadd(5, a + SIDE * a_step, a_step);
    if constexpr (OF == Of::BF16) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (SECOND) _tile_dpbf16ps(2, 5, 6);
        if constexpr (SECOND) _tile_dpbf16ps(3, 5, 7);
    } else {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        if constexpr (SECOND) _tile_dpbusd(2, 5, 6);
        if constexpr (SECOND) _tile_dpbusd(3, 5, 7);
    }
}

// A panel in memory.
struct Panel {
    const char* at;

    const char* rows(long k) const { return at + k * PANEL_BYTES; }
    void copy(long k, long count, char* to) const { std::memcpy(to, rows(k), count * PANEL_BYTES); }
};

// Where sixteen rows of a panel are made from something else, again and again: several places, for what has just been written is read late.
class Ring {
public:
    char* next() { return places[number++ % COUNT]; }

private:
    static constexpr unsigned COUNT = 4;
    alignas(64) char places[COUNT][SIDE * PANEL_BYTES];
    unsigned number = 0;
};

// c [rows, 32] (+)= a [rows, words] · panel [words, 32], by tiles that have been shaped for these rows: of more than SIDE where SECOND. Steps are
// bytes from row to row. Calls between(k) for each step of sixteen words.
template <Of OF, bool SECOND, bool ADD, typename P, typename F>
inline void product(const void* rows_of_a, long a_step, const P& panel, long words, void* sums, long c_step, long rows, F&& between) {
    const char* a = (const char*)rows_of_a;
    char* c = (char*)sums;
    settle();
    if constexpr (ADD) {
        _tile_loadd(0, c, c_step);
        _tile_loadd(1, c + TILE_BYTES, c_step);
        if constexpr (SECOND) _tile_loadd(2, c + SIDE * c_step, c_step);
        if constexpr (SECOND) _tile_loadd(3, c + SIDE * c_step + TILE_BYTES, c_step);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if constexpr (SECOND) _tile_zero(2);
        if constexpr (SECOND) _tile_zero(3);
    }
    long k = 0;
    const char* now = words >= SIDE ? panel.rows(0) : nullptr;
    for (; k + SIDE <= words; k += SIDE) {
        between(k);
        const char* const then = k + 2 * SIDE <= words ? panel.rows(k + SIDE) : nullptr;  // where it is made, it is in the cache when read
        step<OF, SECOND>(a + k * WORD, a_step, now);
        now = then;
    }
    if (k < words) {  // filled up with zeros
        alignas(64) char left[ROWS * TILE_BYTES] = {}, of_panel[SIDE * PANEL_BYTES] = {};
        for (long r = 0; r < rows; r++) std::memcpy(left + r * TILE_BYTES, a + r * a_step + k * WORD, (words - k) * WORD);
        panel.copy(k, words - k, of_panel);
        settle();
        step<OF, SECOND>(left, TILE_BYTES, of_panel);
    }
    _tile_stored(0, c, c_step);
    _tile_stored(1, c + TILE_BYTES, c_step);
    if constexpr (SECOND) _tile_stored(2, c + SIDE * c_step, c_step);
    if constexpr (SECOND) _tile_stored(3, c + SIDE * c_step + TILE_BYTES, c_step);
    settle();
}

#endif

}  // namespace amx
