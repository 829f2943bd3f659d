"""Adapters given to the form: read from a path or uploaded, and what is none refused without a trace."""

import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from tests.conftest import FIXTURE, Server
from tests.webapp.test_pages import form
from trainer_core.config import RunConfig
from webapp import uploads

CONFIG = (FIXTURE / "adapter" / "adapter_config.json").read_bytes()
WEIGHTS = (FIXTURE / "adapter" / "adapter_model.safetensors").read_bytes()
AI_TOOLKIT = save(
    {
        name.replace("base_model.model.", "diffusion_model.decoder."): tensor
        for name, tensor in load_file(FIXTURE / "adapter" / "adapter_model.safetensors").items()
    }
)
SETTINGS = {
    "type": "lora",
    "targets": ["self_attention", "cross_attention"],
    "alpha": 8,
    "rank": 4,
    "rank_stabilized": False,
}


def zipped(**files: bytes) -> bytes:
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w") as opened:
        for name, content in files.items():
            opened.writestr(name.replace("__", "/").replace("_dot_", "."), content)
    return archive.getvalue()


WHOLE_ZIP = zipped(a__adapter_config_dot_json=CONFIG, a__adapter_model_dot_safetensors=WEIGHTS, a__README_dot_md=b"x")


def upload(server: Server, **files: bytes) -> Any:
    parts = [("files", (name.replace("_dot_", "."), content)) for name, content in files.items()]
    return server.http.post("/api/adapters", files=parts)


def kept(server: Server) -> list[str]:
    folder = server.home / "adapters"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize(
    ("files", "alpha", "stem"),
    [
        ({"adapter_config_dot_json": CONFIG, "adapter_model_dot_safetensors": WEIGHTS}, 8, "adapter"),
        ({"Mein Adapter_dot_zip": WHOLE_ZIP}, 8, "mein-adapter"),
        ({"funk_dot_safetensors": AI_TOOLKIT}, 4, "funk"),
        ({"../../evil_dot_safetensors": AI_TOOLKIT}, 4, "evil"),
    ],
)
def test_an_upload_is_read_kept_once_and_a_run_starts_from_it(
    files: dict[str, bytes], alpha: int, stem: str, shared_server: Server
) -> None:
    answer = upload(shared_server, **files)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["adapter"] == SETTINGS | {"alpha": alpha}
    assert found["description"].startswith(f"LoRA of rank 4, alpha {alpha}, on 32 modules")
    path = Path(found["path"])
    (name,) = (name for name in kept(shared_server) if name.startswith(f"{stem}-"))
    assert path.is_relative_to(shared_server.home / "adapters" / name)
    assert upload(shared_server, **files).json() == found
    assert [other for other in kept(shared_server) if other.startswith(f"{stem}-")] == [name]
    named = shared_server.http.post("/api/adapters", json={"path": found["path"]})
    assert named.json() == found


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a_dot_pt": b"x"}, "a.pt was given; this takes .safetensors files and zips. Pickled weights are not read."),
        ({"a_dot_safetensors": b"x"}, "adapter.safetensors can't be read as safetensors"),
        ({"a_dot_safetensors": WEIGHTS}, "no adapter_config.json beside it"),
        ({"a_dot_safetensors": save({"unet.x": torch.ones(1)})}, "0 of its 1 tensors (unet.x)"),
        ({"a_dot_zip": b"x"}, "The zip can't be read"),
        ({"a_dot_zip": zipped(x=b"x")}, "The zip has 0 files named adapter_config.json; it should have one."),
        ({"a_dot_zip": WHOLE_ZIP[:-200]}, "The zip can't be read"),
        (
            {
                "a_dot_zip": zipped(
                    a__adapter_config_dot_json=CONFIG,
                    b__adapter_config_dot_json=CONFIG,
                    a__adapter_model_dot_safetensors=WEIGHTS,
                )
            },
            "The zip has 2 files named adapter_config.json",
        ),
        ({"a_dot_zip": zipped(adapter_config_dot_json=b"[]", adapter_model_dot_safetensors=WEIGHTS)}, "a JSON list"),
        ({"a_dot_safetensors": AI_TOOLKIT, "b_dot_safetensors": AI_TOOLKIT}, "2 files were given"),
        ({}, "0 files were given"),
    ],
)
def test_what_is_no_adapter_is_refused_and_nothing_is_kept(
    files: dict[str, bytes], words: str, shared_server: Server
) -> None:
    before = kept(shared_server)
    if files:
        answer = upload(shared_server, **files)
    else:
        answer = shared_server.http.post("/api/adapters", files=[("other", ("a", b"x"))])
    assert answer.status_code == 422
    assert words in answer.json()["error"]
    assert str(shared_server.home) not in answer.json()["error"]
    assert kept(shared_server) == before


def test_a_zip_writes_nothing_outside_and_expands_no_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H5."""
    outside = zipped(**{"..____..__adapter_config_dot_json": CONFIG, "__etc__adapter_model_dot_safetensors": WEIGHTS})
    found = uploads.keep({"a.zip": BytesIO(outside)}, tmp_path / "home")
    assert found.weights.is_relative_to(tmp_path / "home" / "adapters")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]

    monkeypatch.setattr(uploads, "MAX_BYTES", 1 << 20)
    bomb = BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("adapter_config.json", b" " * (2 << 20))
        archive.writestr("adapter_model.safetensors", WEIGHTS)
    with pytest.raises(ValueError, match=r"adapter_config\.json is larger than"):
        uploads.keep({"a.zip": bomb}, tmp_path / "home")
    assert len(list((tmp_path / "home" / "adapters").iterdir())) == 1


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"path": "/no/such/file"}, 422, "There is no file or folder /no/such/file."),
        ({"path": ""}, 422, "Nothing was given"),
        ({"path": "a\0b"}, 422, "NUL"),
        ({"path": 5}, 422, "it takes the path of an adapter"),
        ({}, 422, "it takes the path of an adapter"),
        ([], 422, "send an object"),
    ],
)
def test_a_path_to_nothing_is_refused_in_words(body: Any, status: int, words: str, shared_server: Server) -> None:
    answer = shared_server.http.post("/api/adapters", json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]


def test_the_form_needs_nothing_but_the_path(server: Server) -> None:
    """The fields that the adapter decides are hidden beside it; what still stands in them does not count."""
    posted = form(start_from=str(FIXTURE / "adapter"), adapter__rank="64", adapter__type="lokr", adapter__dropout="0.1")
    answer = server.http.post("/runs", data=posted)
    assert answer.status_code == 303, answer.text
    (run,) = server.runs
    adapter = RunConfig.model_validate(run.settings()).adapter
    assert (adapter.type, adapter.rank, adapter.alpha, adapter.dropout) == ("lora", 4, 8, 0.1)


def test_a_wrong_path_in_the_form_keeps_all_that_was_typed(shared_server: Server) -> None:
    answer = shared_server.http.post("/runs", data=form(start_from="/no/such", adapter__rank="77"))
    assert answer.status_code == 422
    assert "There is no file or folder /no/such." in answer.text
    assert 'value="77"' in answer.text
