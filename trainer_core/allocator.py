"""Main memory given back as soon as a tensor is let go, where a run has little of it: on Linux with glibc.

glibc keeps what is freed for later, but PyTorch asks for aligned memory, for which a freed piece of the same size is
too small: so gaps grow to more than what is in use. Pieces above M_MMAP_THRESHOLD come from the system and go back to
it, which leaves no gaps, but takes time: the system fills each new piece with zeros. An epoch on the shape of XL
(`benchmarks.xl`) took 2.9 GB so in place of 11.2, and a tenth more time.
"""

import ctypes
import sys

M_MMAP_THRESHOLD = -3
"""glibc's number for the option."""
THRESHOLD = 1 << 20
"""Bytes; the tensors of a clip are larger."""


def give_back_at_once() -> None:
    """From now on, in this process; where there is no glibc nothing happens."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt:  # musl has none
            mallopt(M_MMAP_THRESHOLD, THRESHOLD)
