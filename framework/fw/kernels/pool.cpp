// The caller works too, and never waits for a thread that has not begun: beside other programs, whose turn may last milliseconds, a thread
// that is not running costs its share of the speed and not a turn for every piece of work. Who has nothing to do looks out for work for a
// moment, since the next piece mostly follows at once, and sleeps then.
#include "pool.h"

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

#if defined(__linux__)
cpu_set_t cores;
bool bound = false;
#endif

// A thread inherits the processors of who begins it: where OpenMP keeps that one on one, all would share it.
void spread(std::thread& begun) {
#if defined(__linux__)
    if (bound) pthread_setaffinity_np(begun.native_handle(), sizeof cores, &cores);
#else
    (void)begun;
#endif
}

constexpr auto LOOKOUT = std::chrono::microseconds(200);
constexpr uint64_t CLOSED = 0xffffffff;

struct Pool {
    std::mutex used;  // by one caller at a time
    std::atomic<long> threads{1};
    long started = 1;  // the caller itself

    // The number of a job, and which of its pieces is next. A piece is taken by counting it up: who has read what belongs to another job
    // finds another number there and takes nothing.
    std::atomic<uint64_t> turn{CLOSED};
    std::atomic<uint64_t> count{0};
    std::atomic<void*> of{nullptr};
    std::atomic<void (*)(void*, long)> piece{nullptr};
    std::atomic<uint64_t> done{0};

    std::mutex asleep;
    std::condition_variable work, ready;
    std::atomic<long> sleeping{0};
    std::atomic<bool> awaited{false};

    bool open() const { return (turn.load() & CLOSED) < count.load(); }

    void take() {
        uint64_t now = turn.load();
        while ((now & CLOSED) < count.load()) {
            auto* what = piece.load();
            auto* with = of.load();
            if (!turn.compare_exchange_weak(now, now + 1)) continue;
            what(with, long(now & CLOSED));
            // Everything of this job stays as it is until its last piece is done.
            if (done.fetch_add(1) + 1 == count.load() && awaited.load()) {
                std::lock_guard<std::mutex> lock(asleep);
                ready.notify_one();
            }
            now = turn.load();
        }
    }

    void serve(long number) {
        for (;;) {
            if (number < threads.load()) {
                take();
                if (pool::soon([&] { return open(); }, LOOKOUT)) continue;
            }
            std::unique_lock<std::mutex> lock(asleep);
            sleeping.fetch_add(1);
            work.wait(lock, [&] { return number < threads.load() && open(); });
            sleeping.fetch_sub(1);
        }
    }

    void run(uint64_t pieces, void* with, void (*what)(void*, long)) {
        for (; started < threads.load(); started++) {
            try {
                std::thread begun([this, number = started] { serve(number); });
                spread(begun);
                begun.detach();
            } catch (const std::system_error&) {  // the system gives no more: those that are there do the work
                threads.store(started);
            }
        }
        const uint64_t job = (turn.load() >> 32) + 1;
        turn.store(job << 32 | CLOSED);
        count.store(pieces);
        of.store(with);
        piece.store(what);
        done.store(0);
        turn.store(job << 32);
        if (sleeping.load()) {
            {
                std::lock_guard<std::mutex> lock(asleep);
            }
            work.notify_all();
        }
        take();
        auto all = [&] { return done.load() == pieces; };
        if (pool::soon(all, LOOKOUT)) return;
        std::unique_lock<std::mutex> lock(asleep);
        awaited.store(true);
        ready.wait(lock, all);
        awaited.store(false);
    }
};

// Never taken down: its threads may outlast everything else. A child of fork() has none of them, and begins anew.
Pool* the_pool = new Pool;
const int at_fork = pthread_atfork(nullptr, nullptr, [] {
    const long threads = the_pool->threads.load();
    the_pool = new Pool;
    the_pool->threads.store(threads);
});

}  // namespace

void pool::in_pieces(long count, void* of, void (*piece)(void* of, long number)) {
    std::unique_lock<std::mutex> alone(the_pool->used, std::defer_lock);
    if (count > 1 && the_pool->threads.load() > 1 && alone.try_lock()) return the_pool->run(uint64_t(count), of, piece);
    for (long number = 0; number < count; number++) piece(of, number);
}

long pool::threads() { return the_pool->threads.load(); }

// How many work from now on, the caller included.
extern "C" void fw_threads(long count) { the_pool->threads.store(count); }

extern "C" long fw_thread_count() { return pool::threads(); }

// On which processors threads that begin from now on may run. To be said before there are several callers.
extern "C" void fw_cores(const int* numbers, long count) {
#if defined(__linux__)
    CPU_ZERO(&cores);
    for (long i = 0; i < count; i++)
        if (numbers[i] < CPU_SETSIZE) CPU_SET(numbers[i], &cores);
    bound = count > 0;
#endif
}
