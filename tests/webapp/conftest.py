"""A server for tests that start no run, so that they need not each wait for one."""

import signal
from collections.abc import Iterator

import pytest

from tests.conftest import Server


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the session; a test leaves its home without runs."""
    server = Server(tmp_path_factory.mktemp("shared") / "home")
    yield server
    server.http.close()
    server.process.send_signal(signal.SIGINT)
    server.end()
