"""A server with a key: who gets in, how, and how fast the key may be guessed."""

import itertools
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from starlette.exceptions import HTTPException
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.conftest import Server, make_run, wait_for
from webapp import api_key
from webapp.api_key import ApiKey
from webapp.app import make_app
from webapp.settings import Settings

KEY = "correct-horse-battery-staple"
strangers = itertools.count(1)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key that listens everywhere, and behind a proxy's name too."""
    options = ("--host", "0.0.0.0", "--allow-host", "music.example")
    server = Server(tmp_path_factory.mktemp("guarded") / "home", *options, api_key=KEY)
    yield server
    server.stop()


@pytest.fixture
def stranger(guarded: Server) -> Iterator[httpx.Client]:
    """A browser that has not signed in, from an address of its own: its guesses slow no other test."""
    headers = {"X-Forwarded-For": f"192.0.2.{next(strangers)}"}
    with httpx.Client(base_url=guarded.address, headers=headers) as client:
        yield client


def sign_in(client: httpx.Client, key: str = KEY, wanted: str = "/") -> httpx.Response:
    return client.post("/sign-in", data={"key": key, "next": wanted})


@pytest.mark.parametrize(
    "path", ["/", "/runs/new", "/runs/x", "/runs/a%20b?q=1&r=2", "/nothing", "/static/js/draft.js"]
)
def test_a_page_leads_a_stranger_to_the_sign_in_page_and_then_back(path: str, stranger: httpx.Client) -> None:
    answer = stranger.get(path)
    assert answer.status_code == 303
    page = stranger.get(answer.headers["location"])
    assert page.status_code == 200
    assert "<h1>Sign in</h1>" in page.text
    wanted = httpx.URL(answer.headers["location"]).params["next"]
    assert f'value="{wanted.replace("&", "&amp;")}"' in page.text
    signed_in = sign_in(stranger, wanted=wanted)
    assert (signed_in.status_code, signed_in.headers["location"]) == (303, path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/runs"),
        ("POST", "/api/runs"),
        ("GET", "/api/runs/x"),
        ("GET", "/api/runs/x/events"),
        ("POST", "/api/runs/x/stop"),
        ("POST", "/api/adapters"),
        ("GET", "/api/openapi.json"),
        ("GET", "/api/nothing"),
    ],
)
@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", KEY])
def test_the_api_answers_a_stranger_with_a_401(
    method: str, path: str, authorization: str | None, stranger: httpx.Client
) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    answer = stranger.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert set(answer.json()) == {"error"}
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/runs", "/runs/x/stop", "/runs/x/delete", "/runs/x/resume", "/sign-out"])
def test_a_strangers_forms_do_nothing(path: str, guarded: Server, stranger: httpx.Client) -> None:
    answer = stranger.post(path, data={"name": "x"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/sign-in")
    assert list(guarded.runs) == []


def test_a_stranger_gets_no_download_and_no_socket(guarded: Server, stranger: httpx.Client) -> None:
    run = make_run(guarded.home)
    try:
        assert stranger.get(f"/runs/{run.id}/checkpoints/step-000001/download").status_code == 303
        address = f"ws://127.0.0.1:{guarded.port}/runs/{run.id}/live"
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": f"descant-{guarded.port}=e30=.x.y"}):
            with pytest.raises(InvalidStatus) as caught, connect(address, additional_headers=headers):
                pass
            assert caught.value.response.status_code == 403
        with connect(address, additional_headers={"Authorization": f"bearer {KEY}"}) as socket:
            assert run.id in str(socket.recv(timeout=10))
        sign_in(stranger)
        cookie = "; ".join(f"{name}={value}" for name, value in stranger.cookies.items())
        with connect(address, additional_headers={"Cookie": cookie}) as socket:
            assert run.id in str(socket.recv(timeout=10))
    finally:
        run.delete()


def test_the_cookie_holds_no_secret_and_is_kept_from_scripts(guarded: Server, stranger: httpx.Client) -> None:
    given = sign_in(stranger).headers["set-cookie"].lower()
    assert given.startswith(f"descant-{guarded.port}=")
    assert "; httponly" in given
    assert "; samesite=lax" in given
    assert "; max-age=2592000" in given
    assert "secure" not in given
    assert KEY not in given
    over_https = stranger.post("/sign-in", data={"key": KEY}, headers={"X-Forwarded-Proto": "https"})
    assert "; secure" in over_https.headers["set-cookie"].lower()


def test_who_is_signed_in_may_do_all_until_signing_out(stranger: httpx.Client) -> None:
    assert sign_in(stranger).status_code == 303
    page = stranger.get("/")
    assert page.status_code == 200
    assert "Sign out" in page.text
    assert stranger.get("/api/runs").status_code == 200
    assert stranger.get("/sign-in?next=/runs/new").headers["location"] == "/runs/new"
    assert stranger.post("/sign-out").headers["location"] == "/sign-in"
    assert stranger.get("/").status_code == 303
    assert stranger.get("/api/runs").status_code == 401


@pytest.mark.parametrize(
    "wanted",
    [
        "//evil.example",
        "/\\evil.example",
        "https://evil.example",
        "javascript:alert(1)",
        "/\t/evil.example",
        "/\n/evil.example",
        "evil",
        "",
        "\\\\evil.example",
        " //evil.example",
        "/x\r\nSet-Cookie: a=b",
    ],
)
def test_signing_in_leads_nowhere_else(wanted: str, stranger: httpx.Client) -> None:
    assert sign_in(stranger, wanted=wanted).headers["location"] == "/"
    assert stranger.get("/sign-in", params={"next": wanted}).headers["location"] == "/"


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.7:8765", "[::1]:1", "music.example", "MUSIC.example:443"])
def test_numbers_and_allowed_names_are_taken_for_host(host: str, guarded: Server) -> None:
    assert guarded.http.get("/api/runs", headers={"Host": host}).status_code == 200
    origin = f"https://{host}"
    answer = guarded.http.post("/api/runs", headers={"Host": host, "Origin": origin}, json={"adapter": {"rank": 0}})
    assert answer.status_code == 422


@pytest.mark.parametrize("host", ["evil.example", "music.example.evil.example", "1.2.3.4.nip.io", "0x7f.1", "", "["])
def test_other_names_are_refused_also_with_the_key(host: str, guarded: Server) -> None:
    assert guarded.http.get("/api/runs", headers={"Host": host}).status_code in (400, 403)


def test_a_foreign_page_can_not_sign_in_or_post_with_the_cookie(stranger: httpx.Client) -> None:
    """H3."""
    assert stranger.post("/sign-in", data={"key": KEY}, headers={"Origin": "https://evil.example"}).status_code == 403
    sign_in(stranger)
    for origin in ("https://evil.example", "null"):
        assert stranger.post("/api/runs", json={}, headers={"Origin": origin}).status_code == 403
        assert stranger.post("/sign-out", headers={"Origin": origin}).status_code == 403


def test_guessing_in_parallel_is_refused_after_a_few_and_spares_who_is_signed_in(
    guarded: Server, stranger: httpx.Client
) -> None:
    sign_in(stranger)
    own = dict(stranger.headers)
    own.pop("cookie", None)
    address = {"X-Forwarded-For": own["x-forwarded-for"]}

    def guess(number: int) -> int:
        if number % 2:
            headers = address | {"Authorization": f"Bearer guess-{number}"}
            return httpx.get(f"{guarded.address}/api/runs", headers=headers).status_code
        return httpx.post(f"{guarded.address}/sign-in", data={"key": f"guess-{number}"}, headers=address).status_code

    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(guess, range(24)))
    looked_at = statuses.count(401)
    assert set(statuses) == {401, 429}
    # Five at once; in the seconds that 24 requests may take, one or two more.
    assert api_key.FREE_GUESSES <= looked_at <= api_key.FREE_GUESSES + 3

    def must_wait_long() -> bool:
        answer = httpx.get(f"{guarded.address}/api/runs", headers=address | {"Authorization": "Bearer wrong"})
        return int(answer.headers.get("Retry-After", 0)) > 2

    wait_for(must_wait_long, "a wait that a busy machine does not sleep through")
    refused = httpx.post(f"{guarded.address}/sign-in", data={"key": KEY}, headers=address)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert "Too many wrong keys came from your address." in refused.text
    assert stranger.get("/api/runs").status_code == 200  # signed in, at the same address
    assert guarded.http.get("/api/runs").status_code == 200  # with the key, from another


def test_an_address_that_is_only_claimed_does_not_count_without_a_proxy(tmp_path: Path) -> None:
    server = Server(tmp_path / "home", api_key=KEY)
    try:
        statuses = [
            httpx.get(
                f"{server.address}/api/runs",
                headers={"Authorization": f"Bearer {number}", "X-Forwarded-For": f"192.0.2.{number}"},
            ).status_code
            for number in range(10)
        ]
    finally:
        server.stop()
    assert 429 in statuses


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time by which guesses are slowed."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def waiting(key: ApiKey, address: str) -> int:
    """How long `address` has to wait; 0 where a wrong key was looked at."""
    try:
        return int(key.is_known(b"wrong", address))
    except HTTPException as error:
        return int((error.headers or {})["Retry-After"])


def test_the_wait_doubles_up_to_a_minute_and_the_right_key_ends_it(clock: list[float]) -> None:
    key = ApiKey(KEY)
    assert [waiting(key, "a") for _ in range(5)] == [0] * 5
    waits = []
    for _ in range(8):
        waits.append(waiting(key, "a"))
        clock[0] += waits[-1]
        assert waiting(key, "a") == 0
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert waiting(key, "b") == 0
    clock[0] += 60
    assert key.is_known(KEY.encode(), "a")
    assert [waiting(key, "a") for _ in range(6)] == [0] * 5 + [1]


def test_a_network_counts_as_one_guesser_and_memory_is_bounded(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ApiKey(KEY)
    assert [waiting(key, f"2001:db8::{number}") for number in range(6)] == [0] * 5 + [1]
    assert [waiting(key, address) for address in ["::ffff:192.0.2.1", "192.0.2.1"] * 3] == [0] * 5 + [1]
    monkeypatch.setattr(api_key, "MAX_ADDRESSES", 100)
    for number in range(1000):
        waiting(key, f"10.0.{number // 256}.{number % 256}")
    assert len(key._wrong) == 100


def test_the_cookies_secret_depends_on_the_key_and_on_bytes_nobody_else_may_read(tmp_path: Path) -> None:
    first = ApiKey(KEY).cookie_secret(tmp_path)
    assert ApiKey(KEY).cookie_secret(tmp_path) == first
    assert ApiKey(KEY + "x").cookie_secret(tmp_path) != first
    assert stat.S_IMODE((tmp_path / "cookie_secret").stat().st_mode) == 0o600
    (tmp_path / "cookie_secret").unlink()
    assert ApiKey(KEY).cookie_secret(tmp_path) != first


def test_no_route_is_open_to_strangers_but_those_of_signing_in(tmp_path: Path, stranger: httpx.Client) -> None:
    """Every route of the application, so that a new one can't be forgotten."""
    app = make_app(Settings(tmp_path, api_key=KEY))
    asked = 0
    for route in app.routes:
        path = getattr(route, "path", "").replace("{run_id}", "x").replace("{name}", "step-000001")
        for method in getattr(route, "methods", None) or ():
            if path != "/sign-in":
                assert stranger.request(method, path).status_code in (303, 401), (method, path)
                asked += 1
    assert asked > 15
