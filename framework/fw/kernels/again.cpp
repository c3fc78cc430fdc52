// Calls that were made before, one after another, with nothing between them.
#include "again.h"

namespace {

struct Made {
    void (*call)(const int64_t* words);
    const int64_t* words;
};

}  // namespace

extern "C" void fw_again(const Made* calls, long count) {
    for (long i = 0; i < count; i++) calls[i].call(calls[i].words);
}
