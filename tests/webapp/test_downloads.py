"""Checkpoints as files over real HTTP: formats, ranges, refusals, and nothing left behind."""

import json
import shutil
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from tests.conftest import FIXTURE, Server, make_run, wait_for
from trainer_core.formats import FORMATS, PRECISIONS
from trainer_core.run_dir import RunDir


@pytest.fixture
def run(shared_server: Server) -> RunDir:
    """A run with one checkpoint: ACE-Step's own adapter."""
    run = make_run(shared_server.home, name="Été 1")
    shutil.copytree(FIXTURE / "adapter", run.checkpoints / "step-000006")
    (run.checkpoints / "step-000006" / "state.json").write_text('{"step": 6, "epoch": 2}')
    return run


def address(run: RunDir, query: str = "") -> str:
    return f"/runs/{run.id}/checkpoints/step-000006/download?{query}"


def made(server: Server) -> list[Path]:
    """What making downloads has left."""
    return list(server.temporary.iterdir())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_format_comes_in_every_precision_under_a_name_that_says_so(
    name: str, precision: str, run: RunDir, shared_server: Server
) -> None:
    answer = shared_server.http.get(address(run, f"format={name}&precision={precision}"))
    assert answer.status_code == 200
    expected = f"ete-1-step-000006-{name}-{precision}.{'zip' if name == 'peft' else 'safetensors'}"
    assert answer.headers["content-disposition"] == f'attachment; filename="{expected}"'
    assert int(answer.headers["content-length"]) == len(answer.content)
    if name != "peft":  # whose dtypes are looked at in trainer_core/test_exports.py
        tensors = load(answer.content)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
        assert {tensor.dtype for key, tensor in tensors.items() if not key.endswith(".alpha")} == {dtype}
        assert len(tensors) == (96 if name == "comfyui" else 64)
    wait_for(lambda: not made(shared_server), "an empty folder", 5)


def test_the_first_format_and_precision_are_meant_where_none_is_named(run: RunDir, shared_server: Server) -> None:
    disposition = shared_server.http.get(address(run)).headers["content-disposition"]
    assert "ete-1-step-000006-peft-bf16.zip" in disposition


@pytest.mark.parametrize("name", FORMATS)
def test_a_download_that_broke_off_is_resumed_to_the_same_bytes(name: str, run: RunDir, shared_server: Server) -> None:
    """As a browser does: by range, if the file is still the same; else it gets the whole new one."""
    get, place = shared_server.http.get, address(run, f"format={name}")
    whole = get(place)
    assert whole.headers["accept-ranges"] == "bytes"
    size, tag = len(whole.content), whole.headers["etag"]
    rest = get(place, headers={"Range": "bytes=1000-", "If-Range": tag})
    assert rest.status_code == 206
    assert rest.headers["content-range"] == f"bytes 1000-{size - 1}/{size}"
    assert whole.content[:1000] + rest.content == whole.content
    assert get(place, headers={"Range": "bytes=10-19"}).content == whole.content[10:20]
    assert get(place, headers={"Range": f"bytes={size}-"}).status_code == 416
    head = shared_server.http.head(place)
    assert (head.headers["content-length"], head.headers["etag"], head.content) == (str(size), tag, b"")

    weights = run.checkpoints / "step-000006" / "adapter_model.safetensors"
    save_file({key: tensor + 1 for key, tensor in load_file(weights).items()}, weights)
    (run.checkpoints / "step-000006" / "new").touch()  # which changes the folder's time, and so the tag
    again = get(place, headers={"Range": "bytes=1000-", "If-Range": tag})
    assert again.status_code == 200
    assert again.content != whole.content
    wait_for(lambda: not made(shared_server), "an empty folder", 5)


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("format=midi", 400, "there are peft, diffusers, comfyui"),
        ("precision=fp8", 400, "there are bf16, fp16, fp32"),
        ("format=", 400, "there are peft"),
        ("format=../peft", 400, "there are peft"),
    ],
)
def test_what_there_is_not_is_refused_in_words(
    query: str, status: int, words: str, run: RunDir, shared_server: Server
) -> None:
    answer = shared_server.http.get(address(run, query))
    assert answer.status_code == status
    assert words in answer.text


def test_a_dora_is_refused_for_diffusers_with_the_reason_on_the_page_too(run: RunDir, shared_server: Server) -> None:
    checkpoint = run.checkpoints / "step-000006"
    described = json.loads((checkpoint / "adapter_config.json").read_text()) | {"use_dora": True}
    (checkpoint / "adapter_config.json").write_text(json.dumps(described))
    weights = load_file(checkpoint / "adapter_model.safetensors")
    magnitudes = {
        name.replace("lora_B.weight", "lora_magnitude_vector"): torch.ones(len(tensor))
        for name, tensor in weights.items()
        if "lora_B" in name
    }
    save_file(weights | magnitudes, checkpoint / "adapter_model.safetensors")
    answer = shared_server.http.get(address(run, "format=diffusers"))
    assert answer.status_code == 409
    assert "diffusers can&#39;t load a DoRA" in answer.text
    (run.path / "config.json").write_text(json.dumps(run.settings() | {"adapter": {"type": "dora"}}))
    page = shared_server.http.get(f"/runs/{run.id}").text
    assert "diffusers can&#39;t load a DoRA" in page
    assert made(shared_server) == []


def test_a_damaged_checkpoint_is_refused_in_words(run: RunDir, shared_server: Server) -> None:
    weights = run.checkpoints / "step-000006" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    answer = shared_server.http.get(address(run))
    assert answer.status_code == 409
    assert "damaged or something else" in answer.text
    assert made(shared_server) == []


def test_aborted_downloads_leave_no_open_file_and_no_folder(run: RunDir, shared_server: Server) -> None:
    weights = run.checkpoints / "step-000006" / "adapter_model.safetensors"
    rank = 40_000  # so that it does not fit into the sockets
    grown = {
        name: tensor.repeat(rank // 4, 1) if "lora_A" in name else tensor.repeat(1, rank // 4)
        for name, tensor in load_file(weights).items()
        if "layers.0.self_attn." in name
    }
    save_file(grown, weights)
    described = json.loads(weights.with_name("adapter_config.json").read_text()) | {"r": rank}
    weights.with_name("adapter_config.json").write_text(json.dumps(described))
    process = psutil.Process(shared_server.process.pid)
    before = process.num_fds()
    for _ in range(5):
        with shared_server.http.stream("GET", address(run, "format=comfyui&precision=fp32")) as answer:
            assert int(answer.headers["content-length"]) > 60_000_000
            assert next(answer.iter_raw())
    wait_for(lambda: process.num_fds() <= before + 1, "closed files", 10)  # one may be this client's connection
    wait_for(lambda: not made(shared_server), "an empty folder", 10)


def test_the_header_of_a_download_tells_rank_and_alpha(run: RunDir, shared_server: Server, tmp_path: Path) -> None:
    answer = shared_server.http.get(address(run, "format=diffusers&precision=fp32"))
    (tmp_path / "a.safetensors").write_bytes(answer.content)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        options = json.loads(file.metadata()["lora_adapter_metadata"])
    assert (options["transformer.r"], options["transformer.lora_alpha"]) == (4, 8)


def test_a_broken_file_beside_the_adapter_leaves_nothing_behind(run: RunDir, shared_server: Server) -> None:
    checkpoint = run.checkpoints / "step-000006"
    (checkpoint / "adapter_config.json").write_text("{")
    answer = shared_server.http.get(address(run))
    assert answer.status_code == 409
    assert "is not valid JSON" in answer.text
    assert made(shared_server) == []


def test_without_a_place_for_temporary_files_a_download_is_refused_in_words(run: RunDir, shared_server: Server) -> None:
    shared_server.temporary.rmdir()
    try:
        answer = shared_server.http.get(address(run))
    finally:
        shared_server.temporary.mkdir()
    assert answer.status_code == 507
    assert "The file could not be made" in answer.text
