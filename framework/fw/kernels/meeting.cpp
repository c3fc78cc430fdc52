// Ranks of one host that add up what each of them has, through memory that all of them map.
//
// A rank copies its part to where the others read it, says so, and waits for them to have said so. It has two such places and takes
// them in turn: who fills the first one again has been told that the others have filled the second, and are done reading the first.
// Everybody adds in the order of the ranks, so that all have the same sums, wherever in a tensor they stand.
//
// Who waits looks out for a moment, since the others mostly follow at once, and sleeps then.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <ctime>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "again.h"
#include "lanes.h"
#include "pool.h"

namespace {

constexpr auto LOOKOUT = std::chrono::microseconds(200);
constexpr long LOOKS_AGAIN_NS = 100'000'000;  // whether somebody is gone

struct alignas(64) Word {
    std::atomic<uint32_t> value;
};

// At the beginning of the memory; behind it two places of each rank.
struct Shared {
    Word gone;
    struct {
        Word turn, waiting;
    } of[];
};

struct Meeting {
    Shared* shared;
    char* places;
    long rank, ranks, room;
    uint32_t turn;

    char* place(long of) const { return places + (of * 2 + (turn & 1)) * room; }
};

long head_bytes(long ranks) { return long(sizeof(Word) + ranks * sizeof(Shared::of[0])); }

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    const timespec most{0, LOOKS_AGAIN_NS};
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
#else
    const timespec little{0, 50'000};
    (void)most;
    if (word.load() == value) nanosleep(&little, nullptr);
#endif
}

void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

// All ranks are here; false where one never will be.
bool meet(Meeting* m) {
    Shared* s = m->shared;
    s->of[m->rank].turn.value.store(m->turn);
    if (s->of[m->rank].waiting.value.load()) wake(s->of[m->rank].turn.value);
    for (long rank = 0; rank < m->ranks; rank++) {
        std::atomic<uint32_t>& theirs = s->of[rank].turn.value;
        auto here = [&] { return int32_t(theirs.load() - m->turn) >= 0; };
        if (pool::soon(here, LOOKOUT)) continue;
        while (!here()) {
            if (s->gone.value.load()) return false;
            s->of[rank].waiting.value.fetch_add(1);
            const uint32_t found = theirs.load();
            if (int32_t(found - m->turn) < 0) sleep_while(theirs, found);
            s->of[rank].waiting.value.fetch_sub(1);
        }
    }
    return !s->gone.value.load();
}

template <typename T>
void add_up(Meeting* m, T* x, long count) {
    const long most = m->room / long(sizeof(T));
    for (long begin = 0; begin < count; begin += most) {
        const long size = std::min(most, count - begin), whole = size / LANES * LANES;
        m->turn++;
        std::memcpy(m->place(m->rank), x + begin, size * sizeof(T));
        if (!meet(m)) return;
        T* to = x + begin;
        for (long i = 0; i < whole; i += LANES) {
            Lane sum = loaded((const T*)m->place(0) + i);
            for (long rank = 1; rank < m->ranks; rank++) sum += loaded((const T*)m->place(rank) + i);
            stored(to + i, sum);
        }
        for (long i = whole; i < size; i++) {
            float sum = widened(((const T*)m->place(0))[i]);
            for (long rank = 1; rank < m->ranks; rank++) sum += widened(((const T*)m->place(rank))[i]);
            put(to + i, sum);
        }
    }
}

}  // namespace

// Bytes of memory, zeros at first, in which so many ranks meet who exchange `room` bytes at once, a multiple of 64.
extern "C" long fw_meeting_bytes(long ranks, long room) { return head_bytes(ranks) + 2 * ranks * room; }

extern "C" void* fw_meeting(void* memory, long rank, long ranks, long room) {
    return new Meeting{(Shared*)memory, (char*)memory + head_bytes(ranks), rank, ranks, room, 0};
}

extern "C" void fw_meeting_left(void* meeting) { delete (Meeting*)meeting; }

// Nobody waits any more, here and in other ranks; what is computed means nothing.
extern "C" void fw_meeting_ends(void* meeting) {
    Meeting* m = (Meeting*)meeting;
    m->shared->gone.value.store(1);
    for (long rank = 0; rank < m->ranks; rank++) wake(m->shared->of[rank].turn.value);
}

extern "C" long fw_meeting_ended(void* meeting) { return ((Meeting*)meeting)->shared->gone.value.load(); }

// x becomes the sum of all ranks' x, `count` numbers in fp32 where `wide`, else in bfloat16.
extern "C" void fw_add_up(long meeting, void* x, long count, long wide) {
    if (wide) return add_up((Meeting*)meeting, (float*)x, count);
    add_up((Meeting*)meeting, (uint16_t*)x, count);
}

// On the first rank all ranks' x, each of `bytes`, one behind another; others give theirs, and nothing is written.
extern "C" void fw_gather(long meeting, const void* x, void* all, long bytes) {
    Meeting* m = (Meeting*)meeting;
    for (long begin = 0; begin < bytes; begin += m->room) {
        const long size = std::min(m->room, bytes - begin);
        m->turn++;
        std::memcpy(m->place(m->rank), (const char*)x + begin, size);
        if (!meet(m)) return;
        for (long rank = 0; rank < m->ranks && !m->rank; rank++) std::memcpy((char*)all + rank * bytes + begin, m->place(rank), size);
    }
}

AGAIN(fw_add_up)
AGAIN(fw_gather)
