// What a change of low rank adds to a layer, and its gradients, by AMX: y + (s x Aᵀ) Bᵀ in one pass over x and y; backward in two over what came
// in and its gradient. Numbers are bfloat16, but A, B and their gradients, which may be in fp32; sums are fp32.
#include "matrix_parts.h"

#include <algorithm>

#include "pool.h"

using namespace matrix;

namespace {

// A [rank, inner], B [outer, rank]; x, dx [rows, inner], g, the gradient of y, [rows, outer]; low, s x Aᵀ, [rows, wide], `wide` being the rank
// rounded up to 32; da, db as A and B, in fp32. y becomes `base`, of the same shape, and the change; dx may be null, and is added to where `adds`.
struct Change {
    const void *a, *b, *x, *g, *base;
    void *y, *dx, *low, *da, *db;
    long a_half, b_half, rows, inner, outer, rank, adds;
    float scale;
};

#if defined(FW_AMX)

// A factor in panels, [columns/32, steps over inner, 16, 32, 2], by all threads.
class Panels {
public:
    void fill(const void* at, bool half, long columns, long inner, bool turned) {
        Product p{};
        p.b = at, p.b_step = turned ? inner : columns, p.b_turned = turned, p.columns = columns, p.inner = inner;
        steps = steps_of(inner), count = (columns + SIDE - 1) / SIDE;
        char* const to = room.of(count * steps * STEP_BYTES);
        pool::each((count + GROUP - 1) / GROUP, [&](long g) {
            const long first = g * WIDTH, some = std::min(WIDTH, columns - first);
            char* place = to + g * GROUP * steps * STEP_BYTES;
            half ? pack<uint16_t>(p, first, some, 0, inner, place) : pack<float>(p, first, some, 0, inner, place);
        });
        begin = to;
    }
    const char* at(long panel) const { return begin + panel * steps * STEP_BYTES; }

    long steps = 0, count = 0;

private:
    Kept<char> room;
    const char* begin = nullptr;
};

// scale · sums, and what is at `base`, which may be null.
inline void put_half(const float* sums, float scale, const uint16_t* base, uint16_t* to, long count) {
    Lane low = loaded(sums) * scale, high = loaded(sums + 16) * scale;
    if (base) {
        alignas(64) uint16_t there[SIDE];
        _mm512_store_si512(there, halves(base, count));
        low += loaded(there), high += loaded(there + 16);
    }
    _mm512_mask_storeu_epi16(to, first(count), (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
}

// Rows times a thin factor, `low`, times one that spreads them again: to = base + (scale · from · thin) · spread. `to` may be null, and base.
struct Way {
    const uint16_t* from;
    long width, rows;
    float scale;
    uint16_t* low;
    const uint16_t* base;
    uint16_t* to;
    long to_width;
};

// Of 32 rows from one on.
void through(const Way& w, long first, const Panels& thin, const Panels& spread) {
    thread_local Kept<char> room;
    alignas(64) float sums[SIDE * SIDE];
    const long rows = std::min(SIDE, w.rows - first), wide = thin.count * SIDE;
    char* const from = room.of((thin.steps + thin.count) * STEP_BYTES);
    uint16_t* const low = w.low + first * wide;
    tiled(w.from + first * w.width, w.width, rows, w.width, from);
    for (long r = 0; r < thin.count; r++) {
        multiplied(from, thin.at(r), thin.steps, sums, false);
        for (long i = 0; i < rows; i++) put_half(sums + i * SIDE, w.scale, nullptr, low + i * wide + r * SIDE, SIDE);
    }
    if (!w.to) return;
    char* const again = from + thin.steps * STEP_BYTES;
    tiled(low, wide, rows, wide, again);
    for (long n = 0; n < spread.count; n++) {
        multiplied(again, spread.at(n), spread.steps, sums, false);
        for (long i = 0; i < rows; i++) {
            const long at = (first + i) * w.to_width + n * SIDE;
            put_half(sums + i * SIDE, 1.0f, w.base ? w.base + at : nullptr, w.to + at, std::min(SIDE, w.to_width - n * SIDE));
        }
    }
}

void all_through(const Way& w, const Panels& thin, const Panels& spread) {
    pool::each((w.rows + SIDE - 1) / SIDE, [&](long block) {
        amx::Tiles tiles;
        through(w, block * SIDE, thin, spread);
    });
}

// sums [rank, width] = lowᵀ · from, [rows, width]; or turned.
void over_rows(const uint16_t* low, long rank, const uint16_t* from, long width, long rows, float* sums, bool turned) {
    thread_local Kept<char> low_room;
    const long parts = (rank + SIDE - 1) / SIDE, wide = parts * SIDE, steps = steps_of(rows);
    char* const tiles_of_low = low_room.of(parts * steps * STEP_BYTES);
    for (long part = 0; part < parts; part++)
        for (long s = 0; s < steps; s++)
            turn_square(low + s * SIDE * wide + part * SIDE, wide, rows - s * SIDE, SIDE, tiles_of_low + (part * steps + s) * STEP_BYTES);
    Product p{};
    p.b = from, p.b_step = width;
    pool::each((width + WIDTH - 1) / WIDTH, [&](long group) {
        thread_local Kept<char> panel_room;
        alignas(64) float found[SIDE * SIDE];
        const long first = group * WIDTH, here = std::min(WIDTH, width - first);
        char* const panels = panel_room.of(GROUP * steps * STEP_BYTES);
        pack<uint16_t>(p, first, here, 0, rows, panels);
        amx::Tiles tiles;
        for (long part = 0; part < parts; part++)
            for (long n = 0; n * SIDE < here; n++) {
                multiplied(tiles_of_low + part * steps * STEP_BYTES, panels + n * steps * STEP_BYTES, steps, found, false);
                const long columns = std::min(SIDE, here - n * SIDE), ranks = std::min(SIDE, rank - part * SIDE);
                for (long r = 0; r < ranks; r++)
                    for (long i = 0; i < columns; i++) {
                        const long row = part * SIDE + r, column = first + n * SIDE + i;
                        sums[turned ? column * rank + row : row * width + column] = found[r * SIDE + i];
                    }
            }
    });
}

#endif

}  // namespace

extern "C" void fw_lowrank_forward(const Change* c) {
#if defined(FW_AMX)
    thread_local Panels thin, spread;
    thin.fill(c->a, c->a_half, c->rank, c->inner, true);
    spread.fill(c->b, c->b_half, c->outer, c->rank, true);
    const Way way{(const uint16_t*)c->x, c->inner, c->rows, c->scale, (uint16_t*)c->low, (const uint16_t*)c->base, (uint16_t*)c->y, c->outer};
    all_through(way, thin, spread);
#endif
}

extern "C" void fw_lowrank_backward(const Change* c) {
#if defined(FW_AMX)
    thread_local Panels thin, spread;
    thread_local Kept<uint16_t> room;
    const uint16_t *x = (const uint16_t*)c->x, *g = (const uint16_t*)c->g;
    thin.fill(c->b, c->b_half, c->rank, c->outer, false);
    if (c->dx) spread.fill(c->a, c->a_half, c->inner, c->rank, false);
    uint16_t* const low = room.of(c->rows * thin.count * SIDE);
    uint16_t* const dx = (uint16_t*)c->dx;
    all_through({g, c->outer, c->rows, c->scale, low, c->adds ? dx : nullptr, dx, c->inner}, thin, spread);
    over_rows((const uint16_t*)c->low, c->rank, g, c->outer, c->rows, (float*)c->db, true);
    over_rows(low, c->rank, x, c->inner, c->rows, (float*)c->da, false);
#endif
}
