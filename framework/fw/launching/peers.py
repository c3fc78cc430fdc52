"""What the communication libraries say when another rank is gone, in one sentence."""

from __future__ import annotations

import re

from fw.errors import PeerError

_TIMED_OUT = re.compile(r"[Tt]imed out|[Tt]imeout")
_GONE = re.compile(r"closed by peer|reset by peer|[Bb]roken pipe|refused|[Cc]onnect|ncclRemoteError|recvValue|sendBytes|recvBytes")


def peer_error(error: BaseException, timeout_seconds: int) -> PeerError | None:
    """An error of gloo, NCCL or the store as one that says what it means; None for any other error."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    text = str(error)
    if not ("DistError" in kinds or (isinstance(error, RuntimeError) and ("gloo" in text.lower() or "NCCL" in text))):
        return None
    short = re.sub(r"\s+", " ", text.partition("Exception raised from")[0]).strip()[:200]
    short = re.sub(r"\[/\S*/", "[", short)  # the place in the library's source, without the directory it was built in
    if _TIMED_OUT.search(text) and "refused" not in text:
        return PeerError(
            f"another rank did not answer within launch.timeout={timeout_seconds} s; it hangs, it is gone, or the network is down ({short})"
        )
    if _GONE.search(text):
        return PeerError(f"the connection to another rank was lost: that rank has ended or the network is down ({short})")
    return None
