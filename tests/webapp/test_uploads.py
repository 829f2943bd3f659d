"""Adapters given to the form: read from a path or uploaded, and what is none refused without a trace."""

import os
import socket
import stat
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from tests.conftest import FIXTURE, Server
from tests.trainer_core.test_dataset import pickled
from tests.webapp.test_pages import form
from trainer_core.config import RunConfig
from trainer_core.sources import SourceError
from webapp import uploads

CONFIG = (FIXTURE / "adapter" / "adapter_config.json").read_bytes()
WEIGHTS = (FIXTURE / "adapter" / "adapter_model.safetensors").read_bytes()
AI_TOOLKIT = save(
    {
        name.replace("base_model.model.", "diffusion_model.decoder."): tensor
        for name, tensor in load_file(FIXTURE / "adapter" / "adapter_model.safetensors").items()
    }
)
SETTINGS = {"type": "lora", "alpha": 8, "rank": 4, "rank_stabilized": False}


def zipped(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    archive = BytesIO()
    with zipfile.ZipFile(archive, "w", compression) as opened:
        for name, content in files.items():
            opened.writestr(name, content)
    return archive.getvalue()


FOLDER = {"a/adapter_config.json": CONFIG, "a/adapter_model.safetensors": WEIGHTS, "a/README.md": b"x"}
WHOLE_ZIP = zipped(FOLDER)
DEFLATED = zipped(FOLDER, zipfile.ZIP_DEFLATED)


def upload(server: Server, files: dict[str, bytes]) -> Any:
    return server.http.post("/api/adapters", files=[("files", part) for part in files.items()])


def kept(server: Server) -> list[str]:
    folder = server.home / "adapters"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize(
    ("files", "alpha", "stem"),
    [
        ({"adapter_config.json": CONFIG, "adapter_model.safetensors": WEIGHTS}, 8, "adapter"),
        ({"folder/adapter_config.json": CONFIG, "folder/adapter_model.safetensors": WEIGHTS}, 8, "adapter"),
        ({"squeezed.zip": DEFLATED}, 8, "squeezed"),
        ({"adapter_model.safetensors": AI_TOOLKIT}, 4, "adapter-model"),
        ({"Mein Adapter.zip": WHOLE_ZIP}, 8, "mein-adapter"),
        ({"funk.safetensors": AI_TOOLKIT}, 4, "funk"),
        ({"../../evil.safetensors": AI_TOOLKIT}, 4, "evil"),
    ],
)
def test_an_upload_is_read_kept_once_and_a_run_starts_from_it(
    files: dict[str, bytes], alpha: int, stem: str, shared_server: Server
) -> None:
    answer = upload(shared_server, files)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert len(found["adapter"].pop("targets")) == 32
    assert found["adapter"] == SETTINGS | {"alpha": alpha}
    assert found["description"].startswith(f"LoRA of rank 4, alpha {alpha}, on 32 modules")
    path = Path(found["path"])
    (name,) = (name for name in kept(shared_server) if name.startswith(f"{stem}-"))
    assert path.is_relative_to(shared_server.home / "adapters" / name)
    again = upload(shared_server, files).json()
    assert again["path"] == found["path"]
    assert [other for other in kept(shared_server) if other.startswith(f"{stem}-")] == [name]
    named = shared_server.http.post("/api/adapters", json={"path": found["path"]})
    assert named.json() == again


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.pt": b"x"}, "a.pt was given; this takes .safetensors files and zips. Pickled weights are not read."),
        ({"Funk 2.safetensors": b"x"}, "funk-2.safetensors can't be read as safetensors"),
        (
            {"adapter_model.safetensors": WEIGHTS},
            "adapter_config.json is missing, without which the alpha",
        ),
        ({"adapter_config.json": CONFIG}, "adapter_config.json was given. Choose one .safetensors file, one zip, or"),
        ({"a.safetensors": WEIGHTS}, "adapter_config.json is missing, without which the alpha"),
        ({"a.safetensors": save({"unet.x": torch.ones(1)})}, "0 of its 1 tensors (unet.x)"),
        ({"a.zip": b"x"}, "The zip can't be read"),
        ({"a.zip": zipped({"x": b"x"})}, "it has no files called adapter_config.json."),
        ({"a.zip": WHOLE_ZIP[:-200]}, "The zip can't be read"),
        ({"a.zip": DEFLATED[:100] + b"\xff" * 60 + DEFLATED[160:]}, "The zip can't be read"),
        ({"a.zip": zipped(FOLDER, zipfile.ZIP_BZIP2)}, "compressed in a way that is not read"),
        ({"a.zip": zipped(FOLDER, zipfile.ZIP_LZMA)}, "compressed in a way that is not read"),
        ({"a.zip": zipped(FOLDER | {"b/adapter_config.json": CONFIG})}, "it has 2 files called adapter_config.json"),
        ({"a.zip": zipped(FOLDER | {"a/adapter_config.json": b"[]"})}, "a JSON list"),
        ({"a.zip": zipped(FOLDER | {"a/adapter_config.json": b" " * (2 << 20)})}, "is larger than 1 MiB"),
        ({"a.safetensors": AI_TOOLKIT, "b.safetensors": AI_TOOLKIT}, "a.safetensors, b.safetensors was given. Choose"),
        ({}, "Nothing was given. Choose"),
    ],
)
def test_what_is_no_adapter_is_refused_and_nothing_is_kept(
    files: dict[str, bytes], words: str, shared_server: Server
) -> None:
    before = kept(shared_server)
    if files:
        answer = upload(shared_server, files)
    else:
        answer = shared_server.http.post("/api/adapters", files=[("other", ("a", b"x"))])
    assert answer.status_code == 422
    assert words in answer.json()["error"]
    assert str(shared_server.home) not in answer.json()["error"]
    assert kept(shared_server) == before


def entry(name: str, mode: int = 0) -> zipfile.ZipInfo:
    """An entry of exactly this name, which the zipfile module would mend."""
    made = zipfile.ZipInfo("x")
    made.filename, made.external_attr = name, mode << 16
    return made


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (entry("../x"), "'../x' in it is no name of a file inside its folder"),
        (entry("a/../../x"), "is no name of a file inside its folder"),
        (entry("/etc/x"), "is no name of a file inside its folder"),
        (entry("a\\..\\x"), "is no name of a file inside its folder"),
        (entry("C:x"), "is no name of a file inside its folder"),
        (entry("a\0b"), "is no name of a file inside its folder"),
        (entry("link", stat.S_IFLNK | 0o777), "'link' in it is a link or a device"),
        (entry("pipe", stat.S_IFIFO | 0o644), "is a link or a device"),
        (entry("a/README.md"), "'a/README.md' is in it twice"),
        (entry("A/Readme.MD"), "is in it twice"),
    ],
)
def test_a_zip_with_one_entry_that_leads_elsewhere_is_refused_whole(
    odd: zipfile.ZipInfo, words: str, tmp_path: Path
) -> None:
    """H5."""
    archive = BytesIO(WHOLE_ZIP)
    with zipfile.ZipFile(archive, "a") as opened:
        opened.writestr(odd, b"/etc/passwd")
    with pytest.raises(SourceError, match="The zip is refused whole") as caught:
        uploads.keep({"a.zip": archive}, tmp_path / "home")
    assert words in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert list((tmp_path / "home" / "adapters").iterdir()) == []


def test_a_zip_that_is_encrypted_unpacks_to_far_more_or_lies_about_it_is_refused_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H5. The bomb's 10 GB stand in its table of contents only: nothing must be unpacked to see them."""
    encrypted = bytearray(WHOLE_ZIP)
    encrypted[encrypted.rfind(b"PK\1\2") + 8] |= 1  # of the file that is not needed
    many = zipped({str(number): b"" for number in range(1001)} | FOLDER)
    huge = bytearray(zipped(FOLDER | {"zeros": bytes(2 << 20)}, zipfile.ZIP_DEFLATED))
    lying = bytearray(zipped(FOLDER, zipfile.ZIP_DEFLATED))
    weights = lying.rfind(b"PK\1\2", 0, lying.rfind(b"a/adapter_model"))
    lying[weights + 24 : weights + 28] = (100).to_bytes(4, "little")
    zeros = huge.rfind(b"PK\1\2")
    huge[zeros + 20 : zeros + 28] = (10**9).to_bytes(4, "little") * 2  # as if nothing were compressed
    for content, words in (
        (encrypted, "'a/README.md' in it is encrypted"),
        (many, "it has 1,004 files"),
        (huge, "it unpacks to 953 MiB from"),
        (lying, "can't be read"),
    ):
        with pytest.raises(SourceError, match=words):
            uploads.keep({"a.zip": BytesIO(content)}, tmp_path)
        assert list((tmp_path / "adapters").iterdir()) == []
    monkeypatch.setattr(uploads, "MAX_UPLOAD_BYTES", len(WEIGHTS))
    with pytest.raises(SourceError, match="refused whole: it unpacks to"):
        uploads.keep({"a.zip": BytesIO(WHOLE_ZIP)}, tmp_path)
    monkeypatch.setitem(uploads.MAX_BYTES, "adapter_model.safetensors", len(WEIGHTS) - 1)
    with pytest.raises(SourceError, match=r"is larger than"):
        uploads.keep({"a.safetensors": BytesIO(AI_TOOLKIT)}, tmp_path)
    assert list((tmp_path / "adapters").iterdir()) == []


def test_a_pickle_among_an_uploads_files_is_not_opened(shared_server: Server, tmp_path: Path) -> None:
    """H1."""
    sentinel = tmp_path / "sentinel"
    bomb = pickled(sentinel)
    for files in (
        {"adapter_model.safetensors": bomb, "adapter_config.json": CONFIG},
        {"a.safetensors": bomb},
        {"a.bin": bomb},
        {"a.zip": zipped({"adapter_model.bin": bomb, "adapter_config.json": CONFIG})},
        {"a.zip": bomb},
    ):
        assert upload(shared_server, files).status_code == 422
    assert not sentinel.exists()


def test_a_request_that_is_too_large_is_refused_before_it_is_read_or_as_soon_as_it_is(shared_server: Server) -> None:
    chunks = b"".join(b"%x\r\n%s\r\n" % (size, b" " * size) for size in [1 << 16] * 16 + [1])
    for path, kind, most in (
        ("/api/adapters", "multipart/form-data; boundary=x", uploads.MAX_UPLOAD_BYTES),
        ("/api/adapters", "application/json", 1 << 20),
        ("/api/runs", "application/json", 1 << 20),
        ("/runs", "application/x-www-form-urlencoded", 1 << 20),
    ):
        for length, body in (
            (f"Content-Length: {most + 1}", b""),
            ("Transfer-Encoding: chunked", chunks),
        ):
            if body and most > len(body):
                continue
            with socket.create_connection(("127.0.0.1", shared_server.port)) as raw:
                raw.settimeout(10)
                request = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{length}\r\n\r\n"
                raw.sendall(request.encode() + body)
                with raw.makefile("rb") as answer:
                    assert answer.readline().startswith(b"HTTP/1.1 413 ")
                    assert f"The request is larger than {most >> 20:,} MiB".encode() in answer.read()


def test_one_that_was_damaged_since_is_kept_anew_and_what_a_killed_server_left_goes(tmp_path: Path) -> None:
    first = uploads.keep({"a.safetensors": BytesIO(AI_TOOLKIT)}, tmp_path)
    first.weights.write_bytes(b"")
    left = tmp_path / "adapters" / ".upload-x"
    left.mkdir()
    os.utime(left, (0, 0))
    again = uploads.keep({"a.safetensors": BytesIO(AI_TOOLKIT)}, tmp_path)
    assert again.weights == first.weights
    assert again.weights.read_bytes() == AI_TOOLKIT
    assert list((tmp_path / "adapters").iterdir()) == [again.weights.parent]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"path": "/no/such/file"}, 422, "There is no file or folder /no/such/file."),
        ({"path": " "}, 422, "it takes the path of an adapter"),
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
