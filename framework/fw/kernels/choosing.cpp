// From logits to tokens.
#include <algorithm>
#include <cmath>
#include <limits>

#include "again.h"
#include "lanes.h"
#include "pool.h"

namespace {

constexpr long PIECE = 1 << 13;  // numbers that a thread widens at once

void largest_of_row(const float* x, long size, float* best, int64_t* where) {
    constexpr float NONE = -std::numeric_limits<float>::infinity();
    Lane most = Lane{} + NONE;
    Bits at = {}, strange = {};
    const long whole = size / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) {
        const Lane here = loaded(x + i);
        const Bits more = here > most;
        most = more ? here : most;
        at = more ? Bits{} + int32_t(i) : at;
        strange |= here != here;
    }
    bool any = false;
    for (int lane = 0; lane < LANES; lane++) any |= strange[lane] != 0;
    float found = NONE;
    long place = 0;  // of rows of which nothing is larger than that, the first one
    for (int lane = 0; lane < LANES && whole; lane++)
        if (const long there = at[lane] + lane; most[lane] > found || (most[lane] == found && found != NONE && there < place))
            found = most[lane], place = there;
    for (long i = whole; i < size; i++) {
        any |= std::isnan(x[i]);
        if (x[i] > found) found = x[i], place = i;
    }
    if (any) place = std::find_if(x, x + size, [](float v) { return std::isnan(v); }) - x, found = x[place];
    *best = found, *where = place;
}

}  // namespace

// The largest number of each row, and where it is first; not-a-number where there is any, and the first place of one.
extern "C" void fw_largest(const float* x, float* best, int64_t* where, long rows, long size) {
    pool::each(rows, [=](long r) { largest_of_row(x + r * size, size, best + r, where + r); });
}

// y = x in fp32, of `count` numbers.
extern "C" void fw_widen_bf16(const uint16_t* x, float* y, long count) {
    pool::each((count + PIECE - 1) / PIECE, [=](long piece) {
        const long end = std::min(count, (piece + 1) * PIECE);
        long i = piece * PIECE;
        for (; i + LANES <= end; i += LANES) stored(y + i, loaded(x + i));
        for (; i < end; i++) y[i] = from_bf16(x[i]);
    });
}

AGAIN(fw_largest)
AGAIN(fw_widen_bf16)
