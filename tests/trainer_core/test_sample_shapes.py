"""The lengths of samples told from files that may hold anything, in time and memory as their own."""

import pickle
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer_core import sample_shapes
from trainer_core.sources import SourceError

MEMO_BOMB = b"\x80\x02]r" + struct.pack("<I", 2**31) + b"."
HASH_BOMB = b"\x80\x02}K\x01" + b"2\x86" * 60 + b"K\x01s."
GOTTEN_HASH_BOMB = b"\x80\x02}K\x01q\x00" + b"h\x00\x86q\x00h\x00" * 60 + b"K\x01s."
LENGTH_BOMB = (
    b"\x80\x02}(X\x0e\x00\x00\x00target_latentsK\x01q\x00" + b"h\x00\x86q\x00h\x00" * 60 + b"\x85X\x15\x00\x00\x00"
    b"encoder_hidden_statesh\x00\x85u."
)
TEXT_BOMB = b"\x80\x04\x8c\x08" + b"a" * 8 + b"".join(b"\x94h" + bytes([n]) + b"\x93" for n in range(60)) + b"."


def write(folder: Path, pickled: bytes) -> str:
    with zipfile.ZipFile(folder / "a.pt", "w") as file:
        file.writestr("a/data.pkl", pickled)
    return str(folder)


@pytest.mark.parametrize(
    "pickled", [MEMO_BOMB, HASH_BOMB, GOTTEN_HASH_BOMB, LENGTH_BOMB, TEXT_BOMB, b"", b"\x80\x02", b"(" * 90_000]
)
def test_a_file_of_some_bytes_takes_neither_memory_nor_time(pickled: bytes, tmp_path: Path) -> None:
    source = write(tmp_path, pickled)
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises(SourceError, match="can't be read from its largest file"):
        sample_shapes.measure(source)
    assert time.process_time() - began < 5  # the bombs would take hours
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("length", [0, -5, True, 1.5, "a", None, (1, 2), 10**3000, float("nan")])
def test_what_is_no_length_is_refused(length: Any, tmp_path: Path) -> None:
    source = write(tmp_path, pickle.dumps({"target_latents": (length, 64), "encoder_hidden_states": (5, 64)}, 2))
    with pytest.raises(SourceError, match="can't be read from its largest file"):
        sample_shapes.measure(source)


def test_a_file_larger_than_a_sample_is_not_opened(tmp_path: Path) -> None:
    with (tmp_path / "a.pt").open("wb") as file:
        file.truncate(sample_shapes.MAX_SAMPLE_BYTES + 1)
    with pytest.raises(SourceError, match="can't be read from its largest file"):
        sample_shapes.measure(str(tmp_path))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_lengths_are_read_whatever_else_a_sample_holds(protocol: int, tmp_path: Path) -> None:
    tensors = {
        "metadata": {"caption": "x", "tags": ["a", "b"], "bpm": 120, "sizes": (1, 2, 3, 4), "none": None, 7: 1.5},
        "target_latents": torch.zeros(31, 64),
        "attention_mask": torch.ones(31, dtype=torch.bool),
        "encoder_hidden_states": torch.nn.Parameter(torch.zeros(9, 16)).data[:7],
        "context_latents": torch.zeros(31, 128),
    }
    torch.save(tensors, tmp_path / "a.pt", pickle_protocol=protocol)
    found = sample_shapes.measure(str(tmp_path))
    assert (found.frames, found.condition_tokens) == (31, 7)
