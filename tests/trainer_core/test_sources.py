import ctypes
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import FIXTURE
from trainer_core import sources
from trainer_core.sources import SourceError


@pytest.fixture
def without_root_rights() -> Iterator[None]:
    """As root every folder is readable: look at files as nobody for the length of the test."""
    if os.geteuid() != 0:
        yield
        return
    assert sys.platform == "linux"
    libc = ctypes.CDLL(None)
    libc.setfsuid(65534)
    yield
    libc.setfsuid(0)


@pytest.mark.parametrize("find", [sources.find_model, sources.find_tensors])
def test_a_folder_that_is_missing_empty_or_a_file_is_named(find: object, tmp_path: Path) -> None:
    assert callable(find)
    with pytest.raises(SourceError, match=r"There is no folder .*gone"):
        find(tmp_path / "gone")
    with pytest.raises(SourceError, match="is empty"):
        find(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SourceError, match="is a file"):
        find(tmp_path / "file")


@pytest.mark.parametrize("find", [sources.find_model, sources.find_tensors])
def test_an_unreadable_folder_is_named(find: object, tmp_path: Path, without_root_rights: None) -> None:
    assert callable(find)
    locked = tmp_path / "locked"
    if os.geteuid() == 0:  # pytest's folder is root's own; nobody may not enter it
        with pytest.raises(SourceError, match="can't be read: Permission denied"):
            find(tmp_path)
        return
    locked.mkdir(mode=0)
    with pytest.raises(SourceError, match="can't be read: Permission denied"):
        find(locked)


def test_both_layouts_and_the_demo_are_recognised() -> None:
    assert sources.find_model(FIXTURE / "checkpoint").layout == "original"
    assert sources.find_model(sources.DEMO_MODEL).layout == "original"


def test_a_parent_folder_names_the_models_inside() -> None:
    with pytest.raises(SourceError, match=r"no config\.json.*checkpoint"):
        sources.find_model(FIXTURE)


def test_config_without_weights_and_weights_without_config(tmp_path: Path) -> None:
    shutil.copy(FIXTURE / "checkpoint" / "config.json", tmp_path)
    with pytest.raises(SourceError, match=r"no weights.*model\.safetensors"):
        sources.find_model(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(SourceError, match=r"no config\.json"):
        sources.find_model(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "llama"}', "describes llama, not an ACE-Step"),
        ("{}", "describes no known model"),
        ("[]", "holds a JSON list"),
        ("{", "not valid JSON"),
    ],
)
def test_another_models_config_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SourceError, match=message):
        sources.find_model(tmp_path)


def test_missing_shards_are_counted_and_named(tmp_path: Path) -> None:
    shutil.copy(FIXTURE / "checkpoint" / "config.json", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    (tmp_path / "model-1.safetensors").touch()
    with pytest.raises(SourceError, match=r"2 shards, 1 of them are missing: model-2\.safetensors"):
        sources.find_model(tmp_path)
    (tmp_path / "model-2.safetensors").touch()
    assert [path.name for path in sources.find_model(tmp_path).weights] == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]
    index.write_text("{}")
    with pytest.raises(SourceError, match="weight_map"):
        sources.find_model(tmp_path)


def test_a_manifest_from_elsewhere_is_resolved_by_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = tmp_path / "Übungen mit Leerzeichen"
    shutil.copytree(FIXTURE / "tensors", moved)
    monkeypatch.chdir(tmp_path)
    assert len(sources.find_tensors(moved)) == 5
    names = ["C:\\music\\5e6f7081.pt", "/somewhere/1a2b3c4d.pt", "../../2b3c4d5e.pt", "1a2b3c4d.pt"]
    (moved / "manifest.json").write_text(json.dumps({"samples": names}))
    found = sources.find_tensors(moved)
    assert [path.name for path in found] == ["5e6f7081.pt", "1a2b3c4d.pt", "2b3c4d5e.pt"]
    assert {path.parent for path in found} == {moved}


def test_a_manifest_that_lists_missing_files_is_refused(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE / "tensors", tmp_path, dirs_exist_ok=True)
    (tmp_path / "3c4d5e6f.pt").unlink()
    with pytest.raises(SourceError, match=r"lists 5 samples, 1 of them are not in the folder: 3c4d5e6f\.pt"):
        sources.find_tensors(tmp_path)
    (tmp_path / "manifest.json").write_text('{"samples": [1]}')
    with pytest.raises(SourceError, match="no list of paths"):
        sources.find_tensors(tmp_path)


def test_without_a_manifest_all_tensors_count_but_staging_files(tmp_path: Path) -> None:
    for name in ("b.pt", "a.pt", "c.tmp.pt", "preprocess_meta.json", "notes.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in sources.find_tensors(tmp_path)] == ["a.pt", "b.pt"]


def test_a_folder_without_tensors_points_to_the_one_inside(tmp_path: Path) -> None:
    (tmp_path / "song.wav").touch()
    with pytest.raises(SourceError, match="holds no tensors"):
        sources.find_tensors(tmp_path)
    shutil.copytree(FIXTURE / "tensors", tmp_path / "tensors")
    with pytest.raises(SourceError, match=r"give that folder"):
        sources.find_tensors(tmp_path)


def test_shorten_says_how_many_more() -> None:
    assert sources.shorten("abcdefg", 2) == "a, b and 5 more"
    assert sources.shorten("ab", 2) == "a, b"
