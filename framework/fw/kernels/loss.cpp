// Cross-entropy of logits, and its gradient in their place: each row is read once and written once, and computed in fp32 between.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "lanes.h"
#include "pool.h"

namespace {

struct Loss {
    float softcap, smoothing, z_loss;
};

inline float exponential_of(float x) { return exponential(Lane{} + x)[0]; }

// Bound logits, of which `size` rounded up to lanes are in `z`, with -infinity behind; the largest.
template <typename T>
float load_row(const T* from, long size, float softcap, float* z, float* total) {
    const long whole = size / LANES * LANES;
    Lane largest = Lane{} - std::numeric_limits<float>::infinity(), sums = {};
    float most = -std::numeric_limits<float>::infinity();
    auto bound = [=](Lane x) {
        if (softcap <= 0) return x;
        x = x / softcap;
        x = x > 20.0f ? Lane{} + 20.0f : x;
        x = x < -20.0f ? Lane{} - 20.0f : x;
        return softcap * (1.0f - 2.0f / (exponential(2.0f * x) + 1.0f));
    };
    for (long i = 0; i < whole; i += LANES) {
        const Lane x = bound(loaded(from + i));
        stored(z + i, x);
        largest = largest < x ? x : largest;
        sums += x;
    }
    *total = added_up(sums);
    for (int l = 0; l < LANES; l++) most = std::max(most, largest[l]);
    if (whole < size) std::fill_n(z + whole, LANES, -std::numeric_limits<float>::infinity());
    for (long i = whole; i < size; i++) {
        z[i] = bound(Lane{} + widened(from[i]))[0];
        most = std::max(most, z[i]);
        *total += z[i];
    }
    return most;
}

template <typename T>
float of_row(T* row, long label, long size, const Loss& how, bool gradient, float* z) {
    const long lanes = (size + LANES - 1) / LANES * LANES;
    const float s = how.smoothing, w = how.z_loss;
    float total;
    const float most = load_row(row, size, how.softcap, z, &total), chosen = z[label];
    const float *bound = z;
    std::vector<float> capped;
    if (gradient && how.softcap > 0) capped.assign(z, z + lanes), bound = capped.data();
    Lane sums = {};
    for (long i = 0; i < lanes; i += LANES) {
        const Lane x = loaded(z + i);
        Lane weight = exponential(x - most);
        weight = x == Lane{} - std::numeric_limits<float>::infinity() ? Lane{} : weight;
        stored(z + i, weight);
        sums += weight;
    }
    const float sum = added_up(sums), lse = std::log(sum) + most;
    const float loss = lse - (1 - s) * chosen - (s ? s * total / float(size) : 0) + w * lse * lse;
    if (!gradient) return loss;
    const float by = (1 + 2 * w * lse) / sum, less = s / float(size);
    const float at_label = z[label] * by - less + s - 1;
    auto slope = [&](long i) {
        const Lane part = loaded(bound + i) / how.softcap;
        return 1.0f - part * part;
    };
    const long whole = size / LANES * LANES;
    for (long i = 0; i < whole; i += LANES) {
        Lane found = loaded(z + i) * by - less;
        if (how.softcap > 0) found *= slope(i);
        stored(row + i, found);
    }
    auto put_one = [&](long i, float found) {
        const float part = how.softcap > 0 ? bound[i] / how.softcap : 0;
        put(row + i, found * (1 - part * part));
    };
    for (long i = whole; i < size; i++) put_one(i, z[i] * by - less);
    put_one(label, at_label);
    return loss;
}

template <typename T>
void of_rows(T* z, const int64_t* labels, float* losses, long rows, long size, long ignored, const Loss& how, bool gradient) {
    pool::each(rows, [=](long r) {
        thread_local std::vector<float> row;
        row.resize((size + LANES - 1) / LANES * LANES);
        if (labels[r] == ignored) {
            losses[r] = 0;
            if (gradient) std::fill_n(z + r * size, size, T(0));
        } else {
            losses[r] = of_row(z + r * size, labels[r], size, how, gradient, row.data());
        }
    });
}

}  // namespace

// z [rows, size], bfloat16 where `half`, else fp32; afterwards the gradient of the sum of losses where `gradient`. softcap 0: none.
extern "C" void fw_token_loss(void* z, const int64_t* labels, float* losses, long half, long rows, long size, long ignored, long gradient,
                              float softcap, float smoothing, float z_loss) {
    const Loss how{softcap, smoothing, z_loss};
    half ? of_rows((uint16_t*)z, labels, losses, rows, size, ignored, how, gradient)
         : of_rows((float*)z, labels, losses, rows, size, ignored, how, gradient);
}
