"""What the server is started with, checked before it serves anything."""

import ipaddress
import socket
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import platformdirs

from trainer_core.roots import ANYWHERE, Roots

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
MIN_KEY_LENGTH = 16
UNREAD_SECONDS = 120
"""How long what was sent may wait to be read. A download that is paused for longer breaks off, and can be resumed."""
MAKE_A_KEY = 'python -c "import secrets; print(secrets.token_urlsafe())"'


class StartError(ValueError):
    """The server can't start; the message says why and what to do."""


@dataclass(frozen=True)
class Settings:
    """`home` holds the runs; `host` and `port` are where the pages are served.

    Raises StartError where others could reach the pages without a key, and for a key that is easily guessed.
    """

    home: Path
    host: str = "127.0.0.1"
    port: int = 8765
    api_key: str | None = field(default=None, repr=False)
    """What everybody has to know who talks to the server; None asks for nothing."""
    proxy_names: tuple[str, ...] = ()
    """Names under which a reverse proxy passes this server on."""
    allowed: tuple[Path, ...] = ()
    """Folders beside the home for models, data sets and adapters."""

    def __post_init__(self) -> None:
        if self.api_key is None and (self.proxy_names or not self.is_loopback):
            given = f"--allow-host {self.proxy_names[0]}" if self.proxy_names else f"--host {self.host}"
            raise StartError(
                f"{given} lets other machines in, which needs a key that they sign in with: set DESCANT_API_KEY to one "
                f"made with {MAKE_A_KEY}. Or keep to 127.0.0.1 and reach it through an SSH tunnel: "
                "ssh -L 8765:127.0.0.1:8765 THIS-MACHINE."
            )
        if self.api_key is not None and (
            len(self.api_key) < MIN_KEY_LENGTH
            or not (self.api_key.isascii() and self.api_key.isprintable())
            or " " in self.api_key
        ):
            raise StartError(
                f"The API key has {len(self.api_key)} characters; it takes {MIN_KEY_LENGTH} or more of ASCII without "
                f"spaces, which nobody can guess. Make one with {MAKE_A_KEY}."
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the address."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def address(self) -> str:
        """The page's address for a browser on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @cached_property
    def host_names(self) -> frozenset[str]:
        """The names that a request may call this server by, in lower case."""
        names = {self.host, *self.proxy_names}
        if not self.is_loopback:
            machine = socket.gethostname()
            names |= {machine, f"{machine.split('.')[0]}.local"}
        return LOOPBACK_NAMES | {name.lower() for name in names}

    @cached_property
    def roots(self) -> Roots:
        """Where models, data sets and adapters may lie that a request names.

        Everywhere for the person at this machine; who comes from elsewhere gets the home and what is allowed.
        """
        if self.is_loopback and not self.proxy_names and not self.allowed:
            return ANYWHERE
        return Roots((self.home, *self.allowed))


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


def allowed_folders(folders: list[Path]) -> tuple[Path, ...]:
    """The folders of --allow as absolute paths. Raises StartError for one that is not there."""
    found = tuple(folder.expanduser().absolute() for folder in folders)
    for folder in found:
        if not folder.is_dir():
            raise StartError(f"--allow {folder}: there is no such folder.")
    return found


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to this address. Raises StartError when it is taken or not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # Windows, where SO_REUSEADDR would share the port
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    else:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: a client that never reads would keep its connection for ever
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_SECONDS)
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
