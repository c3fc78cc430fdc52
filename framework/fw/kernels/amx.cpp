// Asking the system for the registers of AMX.
#include "amx.h"

#if defined(FW_AMX)
#include <sys/syscall.h>
#include <unistd.h>

namespace {

bool asked() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM of arch_prctl(2), from Linux 5.16 on
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

}  // namespace

const bool amx::here = asked();
#endif
