"""The API key: compared in constant time, and guessed slowly.

From wrong key number FREE_GUESSES on an address has to wait after each, twice as long every time. What comes
meanwhile is refused unseen, so that guessing in parallel gains nothing. Does not cover: many addresses that guess
together, against which the length of the key stands; IPv6 addresses of one network count as one.
"""

import hmac
import ipaddress
import math
import os
import secrets
import tempfile
import time
from pathlib import Path

from starlette.exceptions import HTTPException

FREE_GUESSES = 5
LONGEST_WAIT_SECONDS = 60
MAX_ADDRESSES = 10_000
"""That are remembered; beyond, the one that has not guessed for the longest time is forgotten."""


class ApiKey:
    """The key, and who guessed wrong."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        # By address: how many wrong keys, and until when it has to wait; who guessed last is at the end.
        self._wrong: dict[str, tuple[int, float]] = {}

    def is_known(self, given: bytes, address: str) -> bool:
        """Whether `given`, which came from `address`, is the key. Raises a 429 while that address has to wait.

        Called on the event loop only and without a pause in it, so no two guesses are looked at at once.
        """
        network = _network(address)
        wrong, until = self._wrong.get(network, (0, 0.0))
        now = time.monotonic()
        if now < until:
            seconds = math.ceil(until - now)
            raise HTTPException(
                429,
                f"Too many wrong keys came from your address. Try again in {seconds} s.",
                {"Retry-After": str(seconds)},
            )
        self._wrong.pop(network, None)
        if secrets.compare_digest(given, self._key):
            return True
        wrong += 1
        wait = min(LONGEST_WAIT_SECONDS, 1 << min(wrong - FREE_GUESSES, 6)) if wrong >= FREE_GUESSES else 0
        self._wrong[network] = (wrong, now + wait)
        if len(self._wrong) > MAX_ADDRESSES:
            del self._wrong[next(iter(self._wrong))]
        return False

    def cookie_secret(self, home: Path) -> str:
        """What session cookies are signed with: another key, another secret, and everybody has to sign in again.

        Also made of random bytes kept in `home`: of the key alone, a cookie would let who has one try out keys.
        """
        path = home / "cookie_secret"
        try:
            random = path.read_bytes()
        except FileNotFoundError:
            random = secrets.token_bytes(32)
            handle, partial = tempfile.mkstemp(dir=home)  # readable by nobody else
            with os.fdopen(handle, "wb") as file:
                file.write(random)
            Path(partial).replace(path)
        return hmac.digest(random, self._key, "sha256").hex()


def _network(address: str) -> str:
    """What counts as one guesser: an IPv4 address, or the network of an IPv6 address, which has addresses at will."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address) or ip.ipv4_mapped:
        return str(getattr(ip, "ipv4_mapped", None) or ip)
    return str(ipaddress.ip_network((int(ip), 64), strict=False))
