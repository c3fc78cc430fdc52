// Threads that share work in pieces, and how they wait for one another.
#pragma once
#include <chrono>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pool {

inline void breathe() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether `here` came true within a moment.
template <typename F>
bool soon(F&& here, std::chrono::microseconds moment) {
    const auto end = std::chrono::steady_clock::now() + moment;
    do {
        for (int i = 0; i < 32; i++) {
            if (here()) return true;
            breathe();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

// How many work, the caller included.
long threads();

// piece(of, 0) … piece(of, count - 1), each once, on whatever thread comes first; returns when all are done.
void in_pieces(long count, void* of, void (*piece)(void* of, long number));

template <typename F>
void each(long count, F&& f) {
    in_pieces(count, &f, [](void* of, long number) { (*(F*)of)(number); });
}

}  // namespace pool
