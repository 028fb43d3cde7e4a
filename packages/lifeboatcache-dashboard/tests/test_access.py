"""Tokens, names of the machine, forged requests, headers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from published import MadeUpHome, engine_facts
from vllm_server import free_port

from lifeboat_cache.config import Dashboard as Settings
from lifeboat_cache.dashboard.access import Access, is_loopback, load_secret, refusal
from lifeboat_cache.dashboard.gate import HEADERS, MAX_BODY
from lifeboat_cache.dashboard.serving import CannotListenError, RefusedToServeError, listen

Dashboard = Callable[..., TestClient]

TOKEN = "a-token-of-24-characters"
EVERYWHERE = {"host": "0.0.0.0", "token": TOKEN}


def csrf_of(client: TestClient) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]+)"', client.get("/").text)
    assert found is not None
    return found[1]


def test_others_reach_it_only_with_a_token() -> None:
    assert refusal("127.0.0.1", "") == ""
    assert refusal("::1", "") == ""
    assert refusal("0.0.0.0", TOKEN) == ""
    for host in ("0.0.0.0", "192.168.1.7", "node1", "::"):
        assert "openssl rand -hex 24" in refusal(host, "")
    assert "16 or more" in refusal("0.0.0.0", "short")
    with pytest.raises(RefusedToServeError, match="no token"):
        listen(Settings(host="0.0.0.0", port=65000))


def test_a_taken_address_is_said() -> None:
    with listen(Settings(port=free_port())) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListenError, match=r"choose another dashboard\.port"):
            listen(Settings(port=port))


def test_without_the_token_nothing_is_told(dashboard: Dashboard, made: MadeUpHome) -> None:
    made.publish(engine_facts())
    client = dashboard(**EVERYWHERE)
    for path in ("/", "/targets", "/metrics", "/api/overview", "/openapi.json", "/nothing"):
        answer = client.get(path)
        assert answer.status_code == 401, path
        assert "Llama" not in answer.text
        assert TOKEN not in answer.text
    assert client.get("/healthz").status_code == 200
    assert client.get("/static/style.css").status_code == 200
    assert client.get("/?token=wrong").status_code == 401
    assert client.get("/", headers={"authorization": "Bearer wrong"}).status_code == 401


def test_a_token_in_the_address_becomes_a_cookie_once(dashboard: Dashboard) -> None:
    client = dashboard(**EVERYWHERE)
    answer = client.get(f"/targets?range=1h&token={TOKEN}")
    assert answer.status_code == 303
    assert answer.headers["location"] == "/targets?range=1h"
    (cookie,) = [c for c in answer.headers.get_list("set-cookie") if c.startswith("lifeboat_auth")]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    assert TOKEN not in cookie
    assert client.get("/targets").status_code == 200
    assert client.get("/api/overview").json()["engines"] == 0


def test_the_redirect_never_leads_to_another_machine(dashboard: Dashboard) -> None:
    client = dashboard(**EVERYWHERE)
    for path in ("//evil.example/", "/%5Cevil.example", "///evil.example"):
        answer = client.get(f"http://localhost:9400{path}?token={TOKEN}")
        location = answer.headers.get("location", "/")
        assert re.match(r"/(?![/\\])", location), location


def test_programs_show_the_token_with_every_request(dashboard: Dashboard) -> None:
    client = dashboard(**EVERYWHERE)
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert client.get("/metrics", headers=headers).status_code == 200
    client.cookies.clear()
    # Neither does such a program need what protects browsers from forgery.
    wanted = {"target": "nvme", "digest": "0" * 64}
    answer = client.post("/api/contents/purge", json=wanted, headers=headers)
    assert answer.status_code == 404


def test_a_cookie_of_another_token_is_worth_nothing(dashboard: Dashboard) -> None:
    old = Access("0.0.0.0", 9400, "another-token-of-25-chars", b"s" * 32)
    client = dashboard(**EVERYWHERE)
    client.cookies.set(old.auth_cookie, old.auth_value)
    assert client.get("/").status_code == 401


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("localhost", True),
        ("localhost:9400", True),
        ("127.0.0.1:1234", True),
        ("[::1]:9400", True),
        ("evil.example", False),
        ("evil.example:9400", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("192.168.1.1", False),
        ("", False),
        ("[::1", False),
        ("localhost:port", False),
    ],
)
def test_names_that_lead_here_by_trickery(dashboard: Dashboard, name: str, known: bool) -> None:
    answer = dashboard().get("/", headers={"host": name})
    assert answer.status_code == (200 if known else 421)


def test_changes_need_what_only_the_page_knows(dashboard: Dashboard, home: Path) -> None:
    client = dashboard()
    csrf = csrf_of(client)
    form = {"theme": "dark", "back": "/targets", "csrf": csrf}
    done = client.post("/theme", data={**form, "back": "//["})
    assert (done.status_code, done.headers["location"]) == (303, "/")
    done = client.post("/theme", data=form)
    assert done.status_code == 303
    assert done.headers["location"] == "/targets"
    assert 'data-theme="dark"' in client.get("/").text
    for bad in (
        client.post("/theme", data={**form, "csrf": ""}),
        client.post("/theme", data={**form, "csrf": "0" * 64}),
        client.post("/theme", data=form, headers={"origin": "http://evil.example"}),
        client.post("/theme", data=form, headers={"origin": "http://["}),
        client.post("/theme", data=form, headers={"sec-fetch-site": "cross-site"}),
        client.post("/api/contents/purge", json={"target": "x", "digest": "y"}),
    ):
        assert bad.status_code == 403
    # What another session was given is of no use.
    other = dashboard()
    other.get("/")
    assert other.post("/theme", data=form).status_code == 403
    # Without its cookie neither.
    client.cookies.clear()
    assert client.post("/theme", data=form).status_code == 403


def test_bodies_of_every_kind_are_refused_in_words(dashboard: Dashboard) -> None:
    client = dashboard()
    headers = {"x-csrf-token": csrf_of(client)}
    path = "/api/contents/purge"
    json = {**headers, "content-type": "application/json"}
    for status, answer in (
        (400, client.post(path, content=b"{", headers=json)),
        (400, client.post(path, content=b"[" * 100_000, headers=json)),
        (400, client.post(path, content=b"\xff\xfe", headers=json)),
        (400, client.post(path, content=b'{"target": "\\ud800", "digest": ""}', headers=json)),
        (413, client.post(path, content=b" " * (MAX_BODY + 1), headers=json)),
        (415, client.post(path, content=b"x", headers={**headers, "content-type": "text/xml"})),
        (422, client.post(path, json={"target": 7}, headers=headers)),
        (422, client.post(path, json=[], headers=headers)),
    ):
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]


def test_every_answer_has_the_headers_that_protect(dashboard: Dashboard) -> None:
    client = dashboard()
    for path in ("/", "/nothing", "/api/overview", "/static/style.css", "/metrics"):
        answer = client.get(path)
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
    assert "'unsafe" not in HEADERS["content-security-policy"]
    assert client.get("/").headers["cache-control"] == "no-store"


def test_secrets_are_kept_private(tmp_path: Path) -> None:
    path = tmp_path / "own" / "secret"
    secret = load_secret(path)
    assert len(secret) == 32
    assert load_secret(path) == secret
    assert path.stat().st_mode & 0o077 == 0
    path.write_bytes(b"short")
    assert len(load_secret(path)) == 32
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert len(load_secret(blocked / "secret")) == 32


def test_loopback() -> None:
    assert is_loopback("127.8.8.8")
    assert not is_loopback("localhost.example")
