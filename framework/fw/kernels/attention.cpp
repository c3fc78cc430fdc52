// One query of each sequence over the keys and values of its blocks, wherever these are.
//
// Keys are taken in chunks of a fixed number of positions, whose sums are put together in their order (Dao et al. 2023, flash-decoding): long
// sequences keep all processors busy, and a sequence's result depends neither on the others nor on how many processors there are.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "bf16.h"

namespace {

constexpr int CHUNK = 256;

struct Shape {
    long heads, kv_heads, dim, block_size, table_stride, window;
    float scale, softcap;
};

// Of one key and value head: largest score, sum of weights, and weighted values of each of its query heads.
template <typename T>
void attend_chunk(const T* q, const T* keys, const T* values, const int32_t* table, long begin, long end, long head, const Shape& s,
                  float* found) {
    const long groups = s.heads / s.kv_heads, dim = s.dim, stride = s.kv_heads * dim;
    std::vector<float> wide(groups * dim), row(dim), scores(groups * CHUNK);
    for (long i = 0; i < groups * dim; i++) wide[i] = widened(q[i]) * s.scale;
    for (long t = begin; t < end; t++) {
        const T* key = keys + (long(table[t / s.block_size]) * s.block_size + t % s.block_size) * stride + head * dim;
        for (long h = 0; h < dim; h++) row[h] = widened(key[h]);
        for (long g = 0; g < groups; g++) {
            const float* of = wide.data() + g * dim;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (long h = 0; h < dim; h++) sum += of[h] * row[h];
            scores[g * CHUNK + t - begin] = s.softcap > 0 ? s.softcap * std::tanh(sum / s.softcap) : sum;
        }
    }
    for (long g = 0; g < groups; g++) {
        float* of = scores.data() + g * CHUNK;
        float most = *std::max_element(of, of + (end - begin)), total = 0;
        for (long t = 0; t < end - begin; t++) total += of[t] = std::exp(of[t] - most);
        found[g * (dim + 2)] = most;
        found[g * (dim + 2) + 1] = total;
        std::fill_n(found + g * (dim + 2) + 2, dim, 0.0f);
    }
    for (long t = begin; t < end; t++) {
        const T* value = values + (long(table[t / s.block_size]) * s.block_size + t % s.block_size) * stride + head * dim;
        for (long h = 0; h < dim; h++) row[h] = widened(value[h]);
        for (long g = 0; g < groups; g++) {
            const float weight = scores[g * CHUNK + t - begin];
            float* out = found + g * (dim + 2) + 2;
            for (long h = 0; h < dim; h++) out[h] += weight * row[h];
        }
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
            attend_chunk(q + (t.sequence * s.heads + t.head * groups) * s.dim, keys, values, tables + t.sequence * s.table_stride, t.begin,
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
