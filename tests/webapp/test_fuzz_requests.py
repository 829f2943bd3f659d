"""Whatever a request holds, the answer is a refusal in words or what was asked for; never a failure of the server."""

import contextlib
import http.client
import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import FIXTURE, Server, make_run, writing
from tests.fuzzing import damaged, repeatable
from tests.webapp.test_uploads import DEFLATED, WHOLE_ZIP
from trainer_core.config import fields
from trainer_core.run_dir import RunDir
from trainer_core.sources import SourceError
from webapp import uploads


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, RunDir]]:
    """A server on which a run with one checkpoint is being trained, so that every start is refused; and beside its
    home and its runs the same again, which is not its own."""
    server = Server(tmp_path_factory.mktemp("fuzzed") / "home")
    run = make_run(server.home, hardware={"device": "auto"})
    shutil.copytree(FIXTURE / "adapter", run.checkpoints / "step-000006")
    (run.checkpoints / "step-000006" / "state.json").write_text('{"step": 6, "epoch": 2}')
    for other in (server.home / "runs_evil" / run.id, server.home / run.id, run.path.parent / ".hidden"):
        shutil.copytree(run.path, other)
    with writing(run):
        yield server, run
    server.stop()


ODD = ["", "..", "/etc/passwd", "a\0b", "\ud7ff\ufffe", "~nobody", "demo", "owner/name", "C:\\x", "\\\\server\\share"]
VALUES = st.sampled_from([*ODD, "1e999", "-0", "٣", "9" * 5000, "x" * 5000]) | st.text(max_size=20)
NAMES = st.sampled_from([*fields(), "model", "adapter", "model.", ".source", "a.b.c", ""]) | st.text(max_size=10)


@repeatable(40)
@given(posted=st.lists(st.tuples(NAMES, VALUES), max_size=8), multipart=st.booleans())
def test_any_form_is_answered_in_words(
    posted: list[tuple[str, str]], multipart: bool, busy: tuple[Server, RunDir]
) -> None:
    server, run = busy
    data: dict[str, str | list[str]] = {}
    for name, value in posted:
        data[name] = [*data.get(name, []), value]
    files = [("upload", ("a.pt", b"x"))] if multipart else None
    answer = server.http.post("/runs", data=data, files=files)
    assert answer.status_code in (400, 409, 415, 422), answer.text
    assert "<h1>" in answer.text
    assert [each.id for each in server.runs] == [run.id]


@repeatable(40)
@given(
    body=st.binary(max_size=200)
    | damaged(b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.zip"\r\n\r\nPK\r\n--x--\r\n'),
    kind=st.sampled_from(
        [
            "multipart/form-data; boundary=x",
            "multipart/form-data; boundary=x; charset=utf-7",
            "multipart/form-data; boundary=x; charset=no",
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "application/x-www-form-urlencoded; charset=utf-16",
            "application/json",
        ]
    ),
    path=st.sampled_from(["/runs", "/api/adapters", "/api/runs"]),
)
def test_any_body_is_answered_in_words(body: bytes, kind: str, path: str, busy: tuple[Server, RunDir]) -> None:
    server, run = busy
    answer = server.http.post(path, content=body, headers={"Content-Type": kind})
    assert answer.status_code in (400, 409, 415, 422), answer.text
    assert [each.id for each in server.runs] == [run.id]


STEPS = ["..", "%2e%2e", "%2E.", "%2f", "%5c", "..%2f..%2f", "%00", ".", "%252e", "%ff", "%c0%ae", "~", "C:", "*", ""]


@repeatable(150)
@given(
    start=st.sampled_from(["runs", "api/runs", "static", "static/js", "runs_evil", ".", ".."]),
    pieces=st.lists(
        st.sampled_from([*STEPS, "{run}", ".hidden", "runs_evil", "checkpoints", "step-000006", "download"]),
        min_size=1,
        max_size=6,
    ),
    query=st.sampled_from(["", "?format=peft", "?format=..%2f", "?format=%00", "?precision=%ff&format=", "?%", "?a&a"]),
)
def test_no_address_leads_outside_or_to_a_failure(
    start: str, pieces: list[str], query: str, busy: tuple[Server, RunDir]
) -> None:
    """H2."""
    server, run = busy
    path = f"/{start}/{'/'.join(pieces)}".replace("{run}", run.id)
    status, content = get(server, path + query)
    assert status < 500, (status, path)
    if status == 200:
        # A page or answer about the run itself, or a file of the page's own.
        assert run.id.encode() in content or path.startswith("/static/")


@pytest.mark.parametrize("name", ["step-000006", "step-%30%30%30%30%30%36"])
def test_the_right_address_is_answered(name: str, busy: tuple[Server, RunDir]) -> None:
    """Else the test above could not fail."""
    server, run = busy
    assert get(server, f"/runs/{run.id}/checkpoints/{name}/download")[0] == 200
    for outside in (f"../runs_evil/{run.id}", f"..%2f{run.id}", ".hidden", f"..%2fruns_evil%2f{run.id}"):
        assert get(server, f"/runs/{outside}/checkpoints/{name}/download")[0] == 404


def get(server: Server, address: str) -> tuple[int, bytes]:
    """Status and content of an address as it is, which HTTP clients would tidy up."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
        connection.putrequest("GET", address)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()


@repeatable(200)
@given(content=damaged(WHOLE_ZIP, 400) | damaged(DEFLATED) | damaged(WHOLE_ZIP[-600:]))
def test_a_damaged_zip_is_kept_whole_or_leaves_nothing(content: bytes, tmp_path: Path) -> None:
    """H5."""
    before = list((tmp_path / "adapters").glob("*"))
    try:
        uploads.keep({"a.zip": BytesIO(content)}, tmp_path)
    except SourceError:
        assert list((tmp_path / "adapters").glob("*")) == before
    assert [path.name for path in tmp_path.iterdir()] == ["adapters"]
