"""Memory that is let go returns to the system, seen from outside."""

import subprocess
import sys

import pytest

CODE = """
import sys
from pathlib import Path
import torch
from trainer_core.allocator import give_back_at_once

def own():
    return 1024 * int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])

if sys.argv[1] == "at once":
    give_back_at_once()
torch.ones(8 << 20)  # whose end makes glibc keep pieces of that size
before = own()
kept = []
for _ in range(40):  # large ones that go, with small ones between that stay
    large = torch.ones(1 << 20)
    kept.append(torch.ones(20_000))
    del large
    large = [torch.ones(1 << 20) for _ in range(5)]
    kept.append(torch.ones(20_000))
del large
print(own() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps memory so")
def test_memory_let_go_is_given_back() -> None:
    def grown(how: str) -> int:
        printed = subprocess.run([sys.executable, "-c", CODE, how], check=True, capture_output=True, text=True).stdout
        return int(printed)

    in_use = 80 * 80_000
    assert grown("at once") < in_use + 10_000_000 < grown("as ever")
