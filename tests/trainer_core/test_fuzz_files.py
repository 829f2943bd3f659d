"""Whatever is in a file, reading it ends with what it holds or with a SourceError; nothing else is ever raised."""

import contextlib
import itertools
import json
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import FIXTURE
from tests.fuzzing import as_safetensors, damaged, json_values, repeatable
from trainer_core import adapter_files, dataset, sources
from trainer_core.event_reader import EventReader, parse_line
from trainer_core.headers import read_header
from trainer_core.sources import SourceError

WEIGHTS = (FIXTURE / "adapter" / "adapter_model.safetensors").read_bytes()
HEADER_BYTES = 8 + int.from_bytes(WEIGHTS[:8], "little")
HEADER = json.loads(WEIGHTS[8:HEADER_BYTES])
DESCRIBED = json.loads((FIXTURE / "adapter" / "adapter_config.json").read_text())
SAMPLE = (FIXTURE / "tensors" / "4d5e6f70.pt").read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps(DESCRIBED))
    (tmp_path / "adapter_model.safetensors").write_bytes(WEIGHTS)
    return tmp_path


@repeatable(100)
@given(content=damaged(WEIGHTS, HEADER_BYTES))
def test_damaged_weights(content: bytes, folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(content)
    with contextlib.suppress(SourceError):
        adapter_files.read(folder)


@repeatable(100)
@given(
    header=json_values()
    | st.dictionaries(
        st.sampled_from([*list(HEADER)[:4], "__metadata__", "lora_unet_x.alpha"]),
        json_values()
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "BF16", "I64", "F4", ""]) | json_values(),
                "shape": st.lists(st.integers(-1, 2**70), max_size=9) | json_values(),
                "data_offsets": st.sampled_from([[0, 64], [64, 0], [0], [0, 10**30]]) | json_values(),
            }
        ),
    )
)
def test_a_header_that_says_anything(header: object, folder: Path) -> None:
    file = folder / "a.safetensors"
    file.write_bytes(as_safetensors(header))
    for read in (read_header, adapter_files.read):
        with contextlib.suppress(SourceError):
            read(file)


@repeatable(100)
@given(changes=st.dictionaries(st.sampled_from([*DESCRIBED, "alpha", "decompose_factor"]), json_values(), min_size=1))
def test_a_config_that_says_anything(changes: dict[str, Any], folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(DESCRIBED | changes))
    with contextlib.suppress(SourceError):
        adapter_files.read(folder)


@repeatable(80)
@given(content=damaged((FIXTURE / "checkpoint" / "config.json").read_bytes()))
def test_a_damaged_models_config(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    (tmp_path / "model.safetensors").touch()
    with contextlib.suppress(SourceError):
        sources.find_model(tmp_path)


@repeatable(100)
@given(content=damaged(SAMPLE, 2000))
def test_a_damaged_sample(content: bytes, tmp_path: Path) -> None:
    """F6."""
    (tmp_path / "a.pt").write_bytes(content)
    with contextlib.suppress(SourceError):
        dataset.load(str(tmp_path))


def sample_with(pickle: bytes) -> bytes:
    """The sample with another pickle, and all checksums right."""
    made = BytesIO()
    with zipfile.ZipFile(BytesIO(SAMPLE)) as whole, zipfile.ZipFile(made, "w") as archive:
        for entry in whole.infolist():
            archive.writestr(entry.filename, pickle if entry.filename.endswith(".pkl") else whole.read(entry))
    return made.getvalue()


with zipfile.ZipFile(BytesIO(SAMPLE)) as opened:
    PICKLE = opened.read(next(name for name in opened.namelist() if name.endswith("/data.pkl")))


@repeatable(250)
@given(pickle=damaged(PICKLE))
def test_a_sample_whose_pickle_is_damaged(pickle: bytes, tmp_path: Path) -> None:
    """H1, F6: nothing that the checksums would catch first."""
    (tmp_path / "a.pt").write_bytes(sample_with(pickle))
    with contextlib.suppress(SourceError):
        dataset.load(str(tmp_path))


LINES = [
    b'{"type":"step","seq":1}\n',
    b'{"type":"warning","seq":2,"message":"\xe2\x80\xa8\\u2028"}\n',
    b'{"type":"step","seq":3,"loss":NaN}\n',
    b"\n",
    b"\r\n",
    b'{"type":',
    b"\x00" * 40,
    b"\xff\xfe",
    b"[" * 2000,
]


@repeatable(300)
@given(
    pieces=st.lists(st.sampled_from(LINES) | st.binary(max_size=30), max_size=12),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    most=st.integers(1, 200),
    after=st.integers(0, 4),
)
def test_events_read_while_they_are_written_are_those_of_the_whole_file(
    pieces: list[bytes], cuts: list[int], most: int, after: int, tmp_path: Path
) -> None:
    content = b"".join(pieces)
    path = tmp_path / "events.jsonl"
    path.write_bytes(content)
    whole = EventReader(path, after).read(1 << 30)
    path.write_bytes(b"")
    reader, read = EventReader(path, after), []
    places = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    for start, end in itertools.pairwise(places):
        with path.open("ab") as file:
            file.write(content[start:end])
        while lines := reader.read(most):
            read += lines
    assert read == whole
    assert len(read) == max(0, content.count(b"\n") - after)
    for seq, line in enumerate(read, after + 1):
        event = parse_line(line)
        assert event
        assert event["seq"] == seq
