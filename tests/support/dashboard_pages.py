"""Talking to a dashboard that the agent of a real engine serves."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

__all__ = ["PACKAGE", "Pages", "until"]

#: For the engine's ``PYTHONPATH``: the engines' environments are without the dashboard.
PACKAGE = Path(__file__).parents[2] / "packages/lifeboatcache-dashboard/src"


def until(ask: Callable[[], Any], right: Callable[[Any], bool]) -> Any:
    """Ask again until the answer is right; processes publish every 2 s."""
    give_up = time.monotonic() + 120
    while True:
        try:
            if right(answer := ask()):
                return answer
        except OSError as error:  # it is being started
            answer = error
        assert time.monotonic() < give_up, f"still {answer}"
        time.sleep(0.2)


class Pages:
    """Talks to a dashboard as a browser on this machine does."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"
        self._opener = urllib.request.build_opener(
            urllib.request.HTTPCookieProcessor(CookieJar()), urllib.request.ProxyHandler({})
        )

    def text(self, path: str) -> str:
        with self._opener.open(f"{self._address}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def get(self, path: str) -> Any:
        return json.loads(self.text(path))

    def save(self, **values: str) -> Any:
        found = self.get("/api/configure")
        body = {"token": found["token"], "values": values}
        request = urllib.request.Request(
            f"{self._address}/api/configure/save",
            json.dumps(body).encode(),
            {"content-type": "application/json", "x-csrf-token": found["csrf"]},
        )
        with self._opener.open(request, timeout=30) as answer:
            return json.loads(answer.read())
