// Many rows against one panel by tiles, where what is computed of sums is computed while the next are taken.
#pragma once
#include <algorithm>

#include "amx.h"

namespace amx {

#if defined(FW_AMX)

// f(row, its sums [32]) of all rows against one panel, which has so many words in a row and lies in `bytes` from `at` on; `next`, or null, is the
// panel that comes then. The first rows read the panel, and those that follow fetch the next one, a share each, so that memory is never idle.
template <Of OF, typename P, typename F>
void all_rows(const void* x, long x_step, const P& panel, long rows, long words, const char* at, long bytes, const char* next, F&& f) {
    constexpr long COLUMNS = PANEL_BYTES / long(sizeof(float)), LINE = 64;
    alignas(64) float sums[2][ROWS * COLUMNS];
    const long steps = std::max<long>(1, words / SIDE), lines = (bytes + steps * LINE - 1) / (steps * LINE), some = (ROWS + steps - 1) / steps;
    const long blocks = (rows + ROWS - 1) / ROWS;
    Tiles tiles(std::min(rows, ROWS));
    for (long from = 0, turn = 0; from < rows; from += ROWS, turn = 1 - turn) {
        const long here = std::min(ROWS, rows - from), block = from / ROWS, before = from - ROWS;
        if (from && here < ROWS) tiles.shape(here);
        long told = from ? 0 : ROWS;  // of the block before
        auto tell = [&](long upto) {
            for (; told < upto; told++) f(before + told, sums[1 - turn] + told * COLUMNS);
        };
        auto between = [&](long k) {
            const long step = k / SIDE, from_line = step * lines * LINE;
            if (block == 0) {
                for (long i = 0; i < lines; i++) _mm_prefetch(at + from_line + (2 * lines + i) * LINE, _MM_HINT_T0);
            } else if (next) {
                for (long i = block - 1; i < lines; i += blocks - 1) _mm_prefetch(next + from_line + i * LINE, _MM_HINT_T1);
            }
            tell(std::min(ROWS, (step + 1) * some));
        };
        const char* a = (const char*)x + from * x_step;
        constexpr long STEP = COLUMNS * sizeof(float);
        if (here > SIDE)
            product<OF, true, false>(a, x_step, panel, words, sums[turn], STEP, here, between);
        else
            product<OF, false, false>(a, x_step, panel, words, sums[turn], STEP, here, between);
        tell(ROWS);
        if (from + ROWS >= rows)
            for (long r = 0; r < here; r++) f(from + r, sums[turn] + r * COLUMNS);
    }
}

#endif

}  // namespace amx
