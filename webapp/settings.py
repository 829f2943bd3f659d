"""What the server is started with, checked before it serves anything."""

import ipaddress
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs


class StartError(ValueError):
    """The server can't start; the message says why and what to do."""


@dataclass(frozen=True)
class Settings:
    """`home` holds the runs; `host` and `port` are where the pages are served."""

    home: Path
    host: str = "127.0.0.1"
    port: int = 8765

    @property
    def address(self) -> str:
        """The page's address for a browser on this machine."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def default_home() -> Path:
    """The platform's folder for this person's data."""
    return platformdirs.user_data_path("descant")


def prepare_home(home: Path) -> Path:
    """`home` as an absolute path, made and proved writable. Raises StartError."""
    home = home.expanduser().absolute()
    try:
        (home / "runs").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home / "runs"):
            pass
    except OSError as error:
        raise StartError(
            f"Runs can't be kept in {home}: {error.strerror}. Choose a folder you may write to with --home."
        ) from error
    return home


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to a loopback address. Raises StartError when it is taken or reachable from elsewhere."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise StartError(
            f"--host {host} would let other machines in, and Descant has no sign-in yet. Use 127.0.0.1, and reach it "
            "from elsewhere through an SSH tunnel: ssh -L 8765:127.0.0.1:8765 THIS-MACHINE."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # Windows, where SO_REUSEADDR would share the port
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    else:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(128)
    except OSError as error:
        bound.close()
        raise StartError(
            f"Can't listen on {host}:{port}: {error.strerror}. Is Descant already running there? "
            f"Open http://{host}:{port}, or choose another port with --port."
        ) from error
    return bound
