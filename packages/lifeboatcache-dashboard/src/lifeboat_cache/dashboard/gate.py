"""What every request passes: host, token and forgery are checked before any page is made."""

from __future__ import annotations

import http.cookies
import json
import secrets
import urllib.parse
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from lifeboat_cache.dashboard.access import Access
from lifeboat_cache.dashboard.errors import RefusedError

__all__ = ["HEADERS", "MAX_BODY", "Gate", "wants_json"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: A configuration file is some kilobytes.
MAX_BODY = 1 << 20

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

#: What anybody may see: that it runs, and how it looks.
_OPEN = ("/healthz", "/static/")

#: Sent with every answer.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # Not "no-referrer": browsers would say of forms that they come from nowhere.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def wants_json(path: str) -> bool:
    """Whether the answer to a path is for a program."""
    return path.startswith(("/api/", "/metrics", "/openapi.json", "/healthz"))


class Gate:
    """ASGI middleware.

    Parameters
    ----------
    app
        What is behind it.
    access
        The rules.
    refuse
        Makes the answer to who is turned away.
    """

    def __init__(
        self, app: App, access: Access, refuse: Callable[[Scope, RefusedError], App]
    ) -> None:
        self._app = app
        self._access = access
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers = _Headers(scope)
        session = headers.cookie(self._access.session_cookie)
        fresh = "" if _is_session(session) else secrets.token_hex(16)
        state = scope.setdefault("state", {})
        state["csrf"] = self._access.csrf(fresh or session)
        extra: list[tuple[str, str]] = []
        app = self._app
        try:
            redirect = self._admit(scope, headers)
            if redirect is not None:
                app = redirect
            elif scope["method"] not in _SAFE:
                receive = await self._checked(scope, headers, session, receive)
        except RefusedError as error:
            app = self._refuse(scope, error)
        if fresh and not scope["path"].startswith(_OPEN):
            extra.append(("set-cookie", _cookie(self._access.session_cookie, fresh, "Strict")))
        await app(scope, receive, _adding(send, scope["path"], extra))

    def _admit(self, scope: Scope, headers: _Headers) -> App | None:
        """Let a request in, or raise; an answer that is complete already is returned."""
        access = self._access
        if not access.knows_host(headers.one("host")):
            raise RefusedError(
                421,
                "this dashboard does not answer to that name: open it as localhost, by an address, "
                "or by the name of its machine",
            )
        if not access.token or scope["path"].startswith(_OPEN):
            return None
        query = urllib.parse.parse_qsl(
            scope["query_string"].decode("latin-1"), keep_blank_values=True
        )
        shown = [value for name, value in query if name == "token"]
        if shown and scope["method"] in _SAFE:
            if not access.is_token(shown[0]):
                raise RefusedError(401, "that is not the token: see dashboard.auth_token")
            rest = urllib.parse.urlencode([pair for pair in query if pair[0] != "token"])
            # One slash in front: two would lead to another machine.
            path = "/" + scope["path"].lstrip("/\\")
            path = urllib.parse.quote(path) + (f"?{rest}" if rest else "")
            return _see_other(path, _cookie(access.auth_cookie, access.auth_value, "Lax"))
        if access.is_auth_cookie(headers.cookie(access.auth_cookie)):
            return None
        if self._bearer(headers):
            return None
        raise RefusedError(
            401,
            "this dashboard needs its token: add ?token=... to the address once, or send "
            "`Authorization: Bearer ...`",
        )

    def _bearer(self, headers: _Headers) -> bool:
        kind, _, value = headers.one("authorization").partition(" ")
        return kind.lower() == "bearer" and self._access.is_token(value.strip())

    async def _checked(
        self, scope: Scope, headers: _Headers, session: str, receive: Receive
    ) -> Receive:
        """Refuse a change that another page has forged; the body is given on."""
        body = await _body(receive)
        kind = headers.one("content-type").partition(";")[0].strip().lower()
        given = headers.one("x-csrf-token")
        if kind == "application/x-www-form-urlencoded":
            try:
                form = urllib.parse.parse_qsl(
                    body.decode("utf-8"), keep_blank_values=True, max_num_fields=5000
                )
            except ValueError:
                raise RefusedError(400, "the form cannot be read: reload the page") from None
            scope["state"]["form"] = form
            given = given or next((value for name, value in form if name == "csrf"), "")
        elif kind == "application/json":
            try:
                scope["state"]["json"] = found = json.loads(body)
                if b"\\u" in body:  # half a character can be neither shown nor written
                    json.dumps(found, ensure_ascii=False).encode()
            except (ValueError, RecursionError):
                raise RefusedError(400, "the body is not JSON: correct it") from None
        elif body or kind:
            raise RefusedError(
                415, "send application/json, or application/x-www-form-urlencoded from a form"
            )
        # A program that shows the token itself is not a browser that was misled.
        if not self._bearer(headers):
            self._refuse_forged(headers, session, given)
        return _replayed(body)

    def _refuse_forged(self, headers: _Headers, session: str, given: str) -> None:
        origin = headers.one("origin")
        if origin and _netloc(origin) != headers.one("host").lower():
            raise RefusedError(403, "the request comes from another page: use the dashboard's own")
        if headers.one("sec-fetch-site") not in ("", "same-origin", "none"):
            raise RefusedError(403, "the request comes from another page: use the dashboard's own")
        if not self._access.is_csrf(session, given):
            raise RefusedError(
                403,
                "the page is too old, or the request was not made by it: reload the page and try "
                "again (programs send the csrf value of GET /api/configure as X-CSRF-Token)",
            )


class _Headers:
    def __init__(self, scope: Scope) -> None:
        self._all: list[tuple[str, str]] = [
            (bytes(name).decode("latin-1").lower(), bytes(value).decode("latin-1"))
            for name, value in scope["headers"]
        ]

    def one(self, name: str) -> str:
        """The value of a header; empty if it is missing or there are several."""
        values = [value for key, value in self._all if key == name]
        return values[0] if len(values) == 1 else ""

    def cookie(self, name: str) -> str:
        for key, value in self._all:
            if key == "cookie":
                for part in value.split(";"):
                    found, _, content = part.strip().partition("=")
                    if found == name:
                        return content
        return ""


def _netloc(origin: str) -> str:
    """Host and port of an ``Origin`` header, in lower case; empty if it names none."""
    try:
        return urllib.parse.urlsplit(origin).netloc.lower()
    except ValueError:  # a bracket without its other half
        return ""


def _is_session(text: str) -> bool:
    return len(text) == 32 and all(char in "0123456789abcdef" for char in text)


def _cookie(name: str, value: str, same_site: str) -> str:
    cookie: http.cookies.SimpleCookie = http.cookies.SimpleCookie()
    cookie[name] = value
    cookie[name]["httponly"] = True
    cookie[name]["samesite"] = same_site
    cookie[name]["path"] = "/"
    return cookie[name].OutputString()


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise RefusedError(400, "the request ended early: try again")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY:
            raise RefusedError(413, f"the body is longer than {MAX_BODY:,} bytes: send less")
        if not message.get("more_body"):
            return b"".join(parts)


def _replayed(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _see_other(path: str, cookie: str) -> App:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [(b"location", path.encode("latin-1")), (b"set-cookie", cookie.encode("latin-1"))]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    return app


def _adding(send: Send, path: str, extra: list[tuple[str, str]]) -> Send:
    keep = "public, max-age=3600" if path.startswith("/static/") else "no-store"
    added = [*HEADERS.items(), ("cache-control", keep), *extra]
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in added]

    async def adding(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *raw]}
        await send(message)

    return adding
