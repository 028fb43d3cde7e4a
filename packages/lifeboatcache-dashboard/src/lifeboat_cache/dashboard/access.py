"""Who may talk to the dashboard: tokens, forged requests, names of this machine."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TOKEN_CHARACTERS", "Access", "is_loopback", "load_secret", "refusal"]

#: A token must not be guessed.
TOKEN_CHARACTERS = 16

_SECRET_BYTES = 32


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def refusal(host: str, token: str) -> str:
    """Why nothing may be served like this; empty if it may."""
    make = "make one with `openssl rand -hex 24` and set it as dashboard.auth_token"
    if token and len(token) < TOKEN_CHARACTERS:
        return (
            f"dashboard.auth_token has {len(token)} characters, which can be guessed: take "
            f"{TOKEN_CHARACTERS} or more; {make}"
        )
    if not token and not is_loopback(host):
        return (
            f"dashboard.host is {host}, which other machines can reach, and there is no token: "
            f"{make}, or listen on 127.0.0.1"
        )
    return ""


def load_secret(path: Path) -> bytes:
    """What cookies and forms are signed with, kept so that they survive a restart.

    Where no file can be kept, it lasts as long as the process.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        fd = os.open(path, flags)
        with os.fdopen(fd, "rb") as file:
            found = file.read(_SECRET_BYTES + 1)
        if len(found) == _SECRET_BYTES:
            return found
    secret = secrets.token_bytes(_SECRET_BYTES)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(secret)
        os.replace(temporary, path)
    return secret


@dataclass(frozen=True)
class Access:
    """The rules of one dashboard.

    Attributes
    ----------
    host, port
        Where it listens.
    token
        What must be shown; empty = nothing.
    secret
        Signs cookies and forms.
    """

    host: str
    port: int
    token: str
    secret: bytes

    @property
    def auth_cookie(self) -> str:
        """Name of the cookie that stands for the token; cookies do not tell ports apart."""
        return f"lifeboat_auth_{self.port}"

    @property
    def session_cookie(self) -> str:
        """Name of the cookie that forms are bound to."""
        return f"lifeboat_session_{self.port}"

    def sign(self, *parts: str) -> str:
        """A value that only who has the secret can make."""
        message = "\0".join(parts).encode("utf-8", "surrogateescape")
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()

    @property
    def auth_value(self) -> str:
        """What the cookie holds: the token itself cannot be read from it."""
        return self.sign("auth", self.token)

    def is_token(self, text: str) -> bool:
        """Whether a text is the token; takes as long whatever it is."""
        return bool(self.token) and _equal(text, self.token)

    def is_auth_cookie(self, text: str) -> bool:
        """Whether a cookie stands for the token."""
        return bool(self.token) and _equal(text, self.auth_value)

    def csrf(self, session: str) -> str:
        """What a form of a session must bring along."""
        return self.sign("csrf", session)

    def is_csrf(self, session: str, text: str) -> bool:
        """Whether a form brings the right value."""
        return bool(session) and _equal(text, self.csrf(session))

    def knows_host(self, header: str) -> bool:
        """Whether a ``Host`` header names this machine.

        A page of somebody else's whose name was made to lead here would name itself.
        Beyond loopback the token protects as well: its cookie belongs to one name.
        """
        name = _host_of(header)
        if not name:
            return False
        if is_loopback(name):
            return True
        if is_loopback(self.host):
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            own = {socket.gethostname().lower(), self.host.lower()}
            short = socket.gethostname().split(".")[0].lower()
            return name in own or name.startswith(f"{short}.")
        return True


def _host_of(header: str) -> str:
    """The name in a ``Host`` header, without the port, in lower case."""
    text = header.strip().lower()
    if text.startswith("["):
        address, bracket, port = text[1:].partition("]")
        fine = bool(bracket) and (not port or (port[0] == ":" and port[1:].isdigit()))
        return address if fine else ""
    name, colon, port = text.partition(":")
    return name if not colon or port.isdigit() else ""


def _equal(a: str, b: str) -> bool:
    return hmac.compare_digest(
        a.encode("utf-8", "surrogateescape"), b.encode("utf-8", "surrogateescape")
    )
