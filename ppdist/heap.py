"""How glibc keeps the memory of tensors on the CPU."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_PAD_BYTES = 64 << 20


def keep_freed_memory() -> None:
    """From here on what tensors leave is given to the next ones instead of to the system.

    Every step frees what it has allocated.  By default glibc returns most of it, and the kernel
    has to zero and map the same pages again, page fault by page fault, in the next step.  The
    process keeps the size of its largest step, which the next step needs anyway.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(-1))
        mallopt(_M_TOP_PAD, _PAD_BYTES)
