// Threads that share work in pieces.
#pragma once

namespace pool {

// piece(of, 0) … piece(of, count - 1), each once, on whatever thread comes first; returns when all are done.
void in_pieces(long count, void* of, void (*piece)(void* of, long number));

template <typename F>
void each(long count, F&& f) {
    in_pieces(count, &f, [](void* of, long number) { (*(F*)of)(number); });
}

}  // namespace pool
