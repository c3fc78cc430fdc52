// One query of each sequence over the keys and values of its blocks, wherever these are.
//
// Keys are taken in chunks of a fixed number of positions, whose sums are put together in their order (Dao et al. 2023, flash-decoding): long
// sequences keep all processors busy, and a sequence's result depends neither on the others nor on how many processors there are.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lanes.h"

namespace {

constexpr int CHUNK = 256;

// A row of a head as fp32; what does not fill a register is filled up with zeros.
template <typename T, int DIM>
inline void widen(const T* at, long dim, Lane* to) {
    long l = 0;
    for (; l < (DIM ? DIM : dim) / LANES; l++) to[l] = loaded(at + l * LANES);
    if (DIM == 0 && dim % LANES) {
        float rest[LANES] = {};
        for (long h = 0; h < dim % LANES; h++) rest[h] = widened(at[l * LANES + h]);
        to[l] = loaded(rest);
    }
}

struct Shape {
    long heads, kv_heads, dim, block_size, table_stride, window;
    float scale, softcap;
};

// Of one key and value head: largest score, sum of weights, and weighted values of each of its query heads. DIM 0: of any size.
template <typename T, int DIM>
void attend_chunk(const T* q, const T* keys, const T* values, const int32_t* table, long begin, long end, long head, const Shape& s,
                  float* found) {
    const long groups = s.heads / s.kv_heads, dim = DIM ? DIM : s.dim, stride = s.kv_heads * dim, count = end - begin;
    const long lanes = (dim + LANES - 1) / LANES, n = DIM ? DIM / LANES : lanes;  // registers of a row; n the compiler may know
    thread_local std::vector<Lane> work;
    work.resize((2 * groups + 4) * lanes + groups * (CHUNK / LANES));
    Lane *wide = work.data(), *out = wide + groups * lanes, *row = out + groups * lanes;  // four rows
    float* scores = (float*)(row + 4 * lanes);
    for (long g = 0; g < groups; g++) {
        widen<T, DIM>(q + g * dim, dim, wide + g * lanes);
        for (long l = 0; l < lanes; l++) wide[g * lanes + l] *= s.scale, out[g * lanes + l] = Lane{};
    }
    long at[CHUNK];
    for (long t = begin, block = begin / s.block_size, inside = begin % s.block_size; t < end; t++) {
        at[t - begin] = (long(table[block]) * s.block_size + inside) * stride + head * dim;
        if (++inside == s.block_size) inside = 0, block++;
    }
    for (long t = 0; t < count; t++) {
        widen<T, DIM>(keys + at[t], dim, row);
        for (long g = 0; g < groups; g++) {
            Lane sum = wide[g * lanes] * row[0];
            for (long l = 1; l < n; l++) sum += wide[g * lanes + l] * row[l];
            scores[g * CHUNK + t] = added_up(sum);
        }
    }
    for (long g = 0; g < groups; g++) {
        float* of = scores + g * CHUNK;
        if (s.softcap > 0)
            for (long t = 0; t < count; t++) of[t] = s.softcap * std::tanh(of[t] / s.softcap);
        const long filled = (count + LANES - 1) / LANES * LANES;
        for (long t = count; t < filled; t++) of[t] = -std::numeric_limits<float>::infinity();
        Lane largest = loaded(of);
        for (long t = LANES; t < filled; t += LANES) {
            Lane other = loaded(of + t);
            largest = largest < other ? other : largest;
        }
        float most = largest[0];
        for (int l = 1; l < LANES; l++) most = std::max(most, largest[l]);
        Lane total = {};
        for (long t = 0; t < filled; t += LANES) {
            stored(of + t, exponential(loaded(of + t) - most));
            if (t + LANES > count)
                for (long rest = count; rest < filled; rest++) of[rest] = 0;
            total += loaded(of + t);
        }
        found[g * (dim + 2)] = most;
        found[g * (dim + 2) + 1] = added_up(total);
    }
    long t = 0;
    for (; t + 4 <= count; t += 4) {
        for (int next = 0; next < 4; next++) widen<T, DIM>(values + at[t + next], dim, row + next * lanes);
        for (long g = 0; g < groups; g++) {
            const float* w = scores + g * CHUNK + t;
            for (long l = 0; l < n; l++)
                out[g * lanes + l] += (w[0] * row[l] + w[1] * row[lanes + l]) + (w[2] * row[2 * lanes + l] + w[3] * row[3 * lanes + l]);
        }
    }
    for (; t < count; t++) {
        widen<T, DIM>(values + at[t], dim, row);
        for (long g = 0; g < groups; g++)
            for (long l = 0; l < n; l++) out[g * lanes + l] += scores[g * CHUNK + t] * row[l];
    }
    for (long g = 0; g < groups; g++) std::memcpy(found + g * (dim + 2) + 2, out + g * lanes, dim * sizeof(float));
}

template <typename T>
void attend_any(const T* q, const T* keys, const T* values, const int32_t* table, long begin, long end, long head, const Shape& s,
                float* found) {
    switch (s.dim) {
        case 64: return attend_chunk<T, 64>(q, keys, values, table, begin, end, head, s, found);
        case 128: return attend_chunk<T, 128>(q, keys, values, table, begin, end, head, s, found);
        case 256: return attend_chunk<T, 256>(q, keys, values, table, begin, end, head, s, found);
        default: return attend_chunk<T, 0>(q, keys, values, table, begin, end, head, s, found);
    }
}

template <typename T>
void attend(const T* q, const T* keys, const T* values, const int32_t* tables, const int32_t* lengths, T* out, long sequences, const Shape& s) {
    const long groups = s.heads / s.kv_heads, partial = groups * (s.dim + 2);
    struct Task {
        long sequence, head, begin, end;
    };
    std::vector<Task> tasks;
    std::vector<long> first;  // of each sequence and head
    for (long b = 0; b < sequences; b++)
        for (long head = 0; head < s.kv_heads; head++) {
            first.push_back(long(tasks.size()));
            const long from = s.window > 0 ? std::max<long>(0, lengths[b] - s.window) : 0;
            for (long t = from; t < lengths[b]; t += CHUNK) tasks.push_back({b, head, t, std::min<long>(t + CHUNK, lengths[b])});
        }
    first.push_back(long(tasks.size()));
    std::vector<float> found(tasks.size() * partial);
    const long pairs = sequences * s.kv_heads;
#pragma omp parallel
    {
#pragma omp for schedule(dynamic)
        for (long i = 0; i < long(tasks.size()); i++) {
            const Task& t = tasks[i];
            attend_any(q + (t.sequence * s.heads + t.head * groups) * s.dim, keys, values, tables + t.sequence * s.table_stride, t.begin,
                       t.end, t.head, s, found.data() + i * partial);
        }
#pragma omp for schedule(static)
        for (long p = 0; p < pairs; p++)
            for (long g = 0; g < groups; g++) {
                float most = -std::numeric_limits<float>::infinity(), total = 0;
                for (long i = first[p]; i < first[p + 1]; i++) most = std::max(most, found[i * partial + g * (s.dim + 2)]);
                std::vector<float> sum(s.dim, 0.0f);
                for (long i = first[p]; i < first[p + 1]; i++) {
                    const float* of = found.data() + i * partial + g * (s.dim + 2);
                    const float share = std::exp(of[0] - most);
                    total += share * of[1];
                    for (long h = 0; h < s.dim; h++) sum[h] += share * of[2 + h];
                }
                T* to = out + (p * groups + g) * s.dim;
                for (long h = 0; h < s.dim; h++) put(to + h, sum[h] / total);
            }
    }
}

}  // namespace

// q, out [sequences, heads, dim]; keys, values [slots, kv_heads, dim]; tables [sequences, table_stride] of blocks; lengths [sequences], 1 or more.
// window 0: all positions; softcap 0: none.
#define FW_ATTEND(NAME, T)                                                                                                              \
    extern "C" void NAME(const T* q, const T* keys, const T* values, const int32_t* tables, const int32_t* lengths, T* out,             \
                         long sequences, long heads, long kv_heads, long dim, long block_size, long table_stride, long window,          \
                         float scale, float softcap) {                                                                                  \
        attend(q, keys, values, tables, lengths, out, sequences, Shape{heads, kv_heads, dim, block_size, table_stride, window, scale, softcap}); \
    }

FW_ATTEND(fw_attend_f32, float)
FW_ATTEND(fw_attend_bf16, uint16_t)
