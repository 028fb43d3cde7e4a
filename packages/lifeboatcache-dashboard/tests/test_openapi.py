"""Whatever programs send, the interface answers as it describes itself, and never fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import MadeUpHome, agent_facts, engine_facts

Dashboard = Callable[..., TestClient]

TOKEN = "a-token-of-24-characters"


@pytest.fixture
def client(dashboard: Dashboard, made: MadeUpHome, home: Path) -> TestClient:
    made.publish(engine_facts())
    made.publish(agent_facts(), "agent")
    (home / "lifeboat.yaml").write_text("storage: {fallback_local: {capacity_gb: 9}}\n")
    return dashboard(host="0.0.0.0", token=TOKEN)


def test_every_operation_answers_as_described(client: TestClient) -> None:
    headers = {"authorization": f"Bearer {TOKEN}", "host": "localhost"}
    schema = schemathesis.openapi.from_asgi("/openapi.json", client.app, headers=headers)
    operations: list[Any] = [found.ok() for found in schema.get_all_operations()]  # type: ignore[union-attr]
    paths = {operation.path for operation in operations}
    assert {"/api/overview", "/api/contents/purge", "/api/configure/save", "/metrics"} <= paths
    for operation in operations:

        @settings(
            max_examples=12,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def answers(case: Any) -> None:
            answer = case.call(headers=headers)
            assert answer.status_code < 500, answer.text
            case.validate_response(answer)

        answers()


@settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]),
    path=st.sampled_from(
        ["/", "/targets", "/contents/purge", "/configure", "/theme", "/api/configure/check",
         "/static/../app.py", "/static/%2e%2e/app.py", "/api/contents/purge", "/..%2f"]
    ),
    query=st.text(max_size=20),
    body=st.binary(max_size=60),
    kind=st.sampled_from(
        ["application/json", "application/x-www-form-urlencoded", "text/plain", "", "x/y; z"]
    ),
)  # fmt: skip
def test_nothing_that_is_sent_makes_it_fail(
    client: TestClient, method: str, path: str, query: str, body: bytes, kind: str
) -> None:
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": kind}
    answer = client.request(method, path, params={"q": query}, content=body, headers=headers)
    assert answer.status_code < 500
    assert "import" not in answer.text[:200], "no source code is served"
