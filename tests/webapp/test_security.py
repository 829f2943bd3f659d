"""Who may talk to the server."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.conftest import FIXTURE, Server, fixture_settings, make_run

FOREIGN = [
    "http://evil.example",
    "null",
    "https://127.0.0.1.evil.example",
    "http://127.0.0.1:1",
    "file://",
    "http://[",
    "",
]


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("path", ["/runs", "/api/runs", "/runs/x/stop", "/runs/x/delete", "/api/runs/x/stop"])
def test_a_foreign_page_can_not_post(path: str, origin: str, shared_server: Server) -> None:
    """H3."""
    answer = shared_server.http.post(path, headers={"Origin": origin}, json=fixture_settings())
    assert answer.status_code == 403
    assert "error" in answer.json()
    assert list(shared_server.runs) == []


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_foreign_form_can_not_post(site: str, shared_server: Server) -> None:
    assert shared_server.http.post("/runs", headers={"Sec-Fetch-Site": site}).status_code == 403


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_foreign_page_can_not_open_the_socket(origin: str, shared_server: Server) -> None:
    """H3."""
    run = make_run(shared_server.home)
    address = f"ws://127.0.0.1:{shared_server.port}/runs/{run.id}/live"
    for headers in ({"Origin": origin}, {"Sec-Fetch-Site": "cross-site"}):
        with pytest.raises(InvalidStatus) as caught, connect(address, additional_headers=headers):
            pass
        assert caught.value.response.status_code == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "[", "0.0.0.0", "x@127.0.0.1"]
)
@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/css/app.css"])
def test_a_foreign_host_name_is_refused(host: str, path: str, shared_server: Server) -> None:
    answer = shared_server.http.get(path, headers={"Host": host})
    assert answer.status_code in (400, 403)
    assert "runs" not in answer.text


def test_its_own_pages_and_programs_without_origin_may(shared_server: Server) -> None:
    for headers in ({"Origin": shared_server.address, "Sec-Fetch-Site": "same-origin"}, {}):
        answer = shared_server.http.post("/api/runs", headers=headers, json={"adapter": {"rank": 0}})
        assert answer.status_code == 422
    own: Any = f"http://localhost:{shared_server.port}"
    answer = shared_server.http.post(
        "/api/runs", headers={"Host": f"localhost:{shared_server.port}", "Origin": own}, json={"adapter": {"rank": 0}}
    )
    assert answer.status_code == 422


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that takes adapters, models and data sets from the fixtures only."""
    server = Server(tmp_path_factory.mktemp("limited") / "home", "--allow", str(FIXTURE))
    yield server
    server.stop()


def test_only_what_lies_in_an_allowed_folder_is_read(limited: Server, tmp_path: Path) -> None:
    """F2, H2."""
    assert limited.http.post("/api/adapters", json={"path": str(FIXTURE / "adapter")}).status_code == 200
    adapter = shutil.copytree(FIXTURE / "adapter", tmp_path / "adapter")
    for path in (str(adapter), "/etc/passwd", f"{FIXTURE}/../../../README.md", "~", "."):
        answer = limited.http.post("/api/adapters", json={"path": path})
        assert answer.status_code == 422
        assert f"may read: {limited.home}, {FIXTURE}. " in answer.json()["error"]
    answer = limited.http.post("/api/runs", json=fixture_settings(start_from=str(adapter)))
    assert answer.status_code == 422
    assert set(answer.json()["fields"]) == {"start_from"}
    assert "--allow" in limited.http.post("/runs", data={"dataset.source": str(tmp_path)}).text


def test_a_run_from_the_terminal_is_continued_from_the_page_only_with_its_folders_allowed(
    limited: Server, tmp_path: Path
) -> None:
    data = shutil.copytree(FIXTURE / "tensors", tmp_path / "tensors")
    run = make_run(limited.home, dataset={"source": str(data)})
    shutil.copytree(FIXTURE / "adapter", run.checkpoints / "step-000006")
    for name in ("state.json", "state.safetensors"):
        (run.checkpoints / "step-000006" / name).write_text('{"step": 6, "epoch": 1}')
    answer = limited.http.post(f"/runs/{run.id}/resume")
    assert answer.status_code == 422
    assert f"{data} is, or links to, something outside the folders" in answer.text


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/js/draft.js", "/runs/x", "/nothing"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_no_answer_lets_another_sites_script_read_it(method: str, path: str, shared_server: Server) -> None:
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for sent in (headers, {"Access-Control-Request-Method": "POST"}):
        answer = shared_server.http.request(method, path, headers=sent)
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize("path", ["/", "/runs/new", "/static/css/app.css", "/api/runs", "/nothing"])
def test_every_answer_forbids_injected_script_and_framing(path: str, shared_server: Server) -> None:
    headers = shared_server.http.get(path).headers
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "object-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize("path", ["/", "/runs/new"])
def test_pages_hold_no_inline_script_or_style(path: str, shared_server: Server) -> None:
    text = shared_server.http.get(path).text
    assert "<style" not in text
    assert " style=" not in text
    assert text.count("<script") == text.count("<script src=") + text.count('<script type="module" src=')
