"""Changing the configuration: forms, checking, saving, two people, secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from lifeboat_cache.config import load_config
from lifeboat_cache.config.describe import entries
from lifeboat_cache.dashboard.editor import SECTIONS, Editor, form_keys

Dashboard = Callable[..., TestClient]

FILE = """\
# Ask Mina before changing tiers.
storage:
  tiers:
    - name: nvme     # fast
      type: filesystem
      path: /mnt/nvme
      capacity_gb: 200G
      direct_io: on
security:
  namespace_salt: "a secret salt"
dashboard: {auth_token: "another secret text"}
"""


@pytest.fixture
def file(home: Path) -> Path:
    file = home / "lifeboat.yaml"
    file.write_text(FILE)
    file.chmod(0o640)
    return file


class Program:
    """Talks to the dashboard as a program without a token does."""

    def __init__(self, client: TestClient) -> None:
        self.client = client
        self.read()

    def read(self) -> Any:
        found = self.client.get("/api/configure").json()
        self.token = found.get("token", "")
        given = re.search(r'name="csrf" value="([0-9a-f]+)"', self.client.get("/").text)
        assert given is not None
        assert found.get("csrf", given[1]) == given[1]
        self.headers = {"x-csrf-token": given[1]}
        return found

    def check(self, **values: str) -> Any:
        return self._post("check", {"values": _names(values)}).json()

    def save(self, **values: str) -> Any:
        return self._post("save", {"values": _names(values), "token": self.token})

    def _post(self, what: str, body: Any) -> Any:
        return self.client.post(f"/api/configure/{what}", json=body, headers=self.headers)


def _names(values: dict[str, str]) -> dict[str, str]:
    return {name.replace("__", "."): value for name, value in values.items()}


def field(found: Any, name: str) -> Any:
    rows = [one for section in found["sections"] for one in section["fields"]]
    for many in found["lists"]:
        rows += [one for item in many["items"] for one in item["fields"]] + many["new"]
    return next(one for one in rows if one["name"] == name)


def test_the_form_is_made_from_the_schema(dashboard: Dashboard, file: Path) -> None:
    found = Program(dashboard()).read()
    names = {".".join(path) for path, _, _ in entries() if path and path[0] in SECTIONS}
    shown = {one["name"] for one in (*found["sections"], *found["lists"])}
    assert shown == {name.replace("[]", "") for name in names}
    codec = field(found, "compression.ladder.local")
    assert {"raw", "fp8", "lbq4", "auto"} <= set(codec["options"])
    assert codec["default"] == "fp8"
    assert codec["restart"] is False
    assert field(found, "storage.tiers.0.capacity_gb")["value"] == "200G"
    assert field(found, "storage.tiers.0.direct_io")["value"] == "on"
    assert field(found, "storage.tiers.new.path")["required"] is True
    assert field(found, "engine.io_workers")["unit"] == "threads"


def test_what_is_typed_is_checked_with_the_schemas_words(dashboard: Dashboard, file: Path) -> None:
    program = Program(dashboard())
    found = program.check(
        storage__tiers__0__capacity_gb="200 apples",
        compression__ladder__local="fp9",
        engine__io_workers="100",
    )
    assert set(found["problems"]) == {
        "storage.tiers.0.capacity_gb",
        "compression.ladder.local",
        "engine.io_workers",
    }
    assert "did you mean 'fp8'?" in found["problems"]["compression.ladder.local"]
    assert "Write for example" in found["problems"]["storage.tiers.0.capacity_gb"]
    assert file.read_text() == FILE


def test_only_the_lines_of_what_changes_are_touched(dashboard: Dashboard, file: Path) -> None:
    program = Program(dashboard())
    values = {"storage__tiers__0__capacity_gb": "300G", "compression__ladder__local": "lbq4"}
    found = program.check(**values)
    assert [line for line in found["diff"] if line[0] in "+-"] == [
        "-      capacity_gb: 200G",
        "+      capacity_gb: 300G",
        "+compression:",
        "+  ladder:",
        "+    local: lbq4",
    ]
    assert [(one["key"], one["restart"]) for one in found["changes"]] == [
        ("storage.tiers[0].capacity_gb", False),
        ("compression.ladder.local", False),
    ]
    assert program.save(**values).status_code == 200
    expected = FILE.replace("200G", "300G") + "compression:\n  ladder:\n    local: lbq4\n"
    assert file.read_text() == expected
    assert file.stat().st_mode & 0o777 == 0o640
    previous = file.with_name("lifeboat.yaml.previous")
    assert previous.read_text() == FILE
    assert previous.stat().st_mode & 0o777 == 0o640
    assert load_config(file).config.compression.ladder.local == "lbq4"
    # Emptied again: the default applies, and the file is as it was.
    program.read()
    back = {"storage__tiers__0__capacity_gb": "200G", "compression__ladder__local": ""}
    assert program.save(**back).status_code == 200
    assert file.read_text() == FILE + "compression:\n  ladder:\n"


def test_tiers_are_added_and_taken_out(dashboard: Dashboard, file: Path) -> None:
    program = Program(dashboard())
    new = {
        "storage__tiers__new__name": "hdd",
        "storage__tiers__new__type": "filesystem",
        "storage__tiers__new__path": "/mnt/hdd",
    }
    missing = program.check(**{name: new[name] for name in list(new)[:2]})
    assert "missing" in missing["problems"]["storage.tiers.new.path"]
    added = program.check(**new)["changes"]
    assert [(one["key"], one["new"], one["restart"]) for one in added] == [
        ("storage.tiers[1]", "hdd", False)
    ]
    assert program.save(**new).status_code == 200
    assert [tier.name for tier in load_config(file).config.storage.tiers] == ["nvme", "hdd"]
    assert "# fast" in file.read_text()
    program.read()
    twice = {**new, "storage__tiers__new__path": "/mnt/other"}
    assert "give each tier a name of its own" in next(
        iter(program.check(**twice)["problems"].values())
    )
    gone = program.save(**{"storage__tiers__0__!remove": "yes"})
    assert [one["restart"] for one in gone.json()["changes"]] == [False]
    assert [tier.name for tier in load_config(file).config.storage.tiers] == ["hdd"]
    program.read()
    assert program.save(**{"storage__tiers__0__!remove": "yes"}).status_code == 200
    assert load_config(file).config.storage.tiers == ()


def test_a_file_that_is_not_there_is_made_private(dashboard: Dashboard, home: Path) -> None:
    program = Program(dashboard())
    assert program.read()["exists"] is False
    assert program.save(eviction__policy="none").status_code == 200
    file = home / "lifeboat.yaml"
    assert file.read_text() == "eviction:\n  policy: none\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_what_is_extended_is_overridden_and_not_changed(dashboard: Dashboard, home: Path) -> None:
    file = home / "lifeboat.yaml"
    file.write_text("extends: single_node_gpu\nengine: {io_workers: 4}\n")
    program = Program(dashboard())
    found = program.read()
    assert field(found, "storage.tiers.0.capacity_gb")["value"] == "200"
    assert "extends" in program.check(engine__native_cpu_gb="")["problems"][""]
    values = {"storage__tiers__0__capacity_gb": "500", "engine__io_workers": "6"}
    assert program.save(**values).status_code == 200
    config = load_config(file).config
    (tier,) = config.storage.tiers
    assert (tier.name, tier.capacity_gb, tier.min_free_gb) == ("nvme", 500, 20)
    assert config.engine.io_workers == 6


def test_two_editors_do_not_overwrite_each_other(dashboard: Dashboard, file: Path) -> None:
    one, other = Program(dashboard()), Program(dashboard())
    assert one.save(eviction__policy="none").status_code == 200
    refused = other.save(eviction__policy="lru", engine__io_workers="2")
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "conflict"
    assert load_config(file).config.eviction.policy == "none"
    assert load_config(file).config.engine.io_workers == 8
    other.read()
    assert other.save(engine__io_workers="2").status_code == 200
    config = load_config(file).config
    assert (config.eviction.policy, config.engine.io_workers) == ("none", 2)


def test_a_change_of_what_is_extended_counts_too(dashboard: Dashboard, home: Path) -> None:
    (home / "lifeboat.yaml").write_text("extends: base.yaml\n")
    (home / "base.yaml").write_text("engine: {io_workers: 4}\n")
    program = Program(dashboard())
    (home / "base.yaml").write_text("engine: {io_workers: 5}\n")
    assert program.save(eviction__policy="none").status_code == 409


def test_it_is_refused_where_it_is_not_allowed(
    dashboard: Dashboard, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(FILE.replace("dashboard: {", "dashboard: {allow_config_edit: false, "))
    program = Program(dashboard())
    assert "allow_config_edit" in program.read()["problem"]
    # Nor by making the file one that cannot be used.
    file.write_text(file.read_text() + "engine: {io_workers: 0}\n")
    program.read()
    assert program.save(eviction__policy="none").status_code == 403
    assert "disabled" in program.client.get("/configure").text
    purge = {"target": "nvme", "digest": "0" * 64}
    answer = program.client.post("/api/contents/purge", json=purge, headers=program.headers)
    assert answer.status_code == 403


def test_it_is_refused_where_the_file_cannot_be_written(
    dashboard: Dashboard, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_args, **_kwargs: False)
    program = Program(dashboard())
    assert "cannot be written by this user" in program.read()["problem"]
    assert program.save(eviction__policy="none").status_code == 403
    assert file.read_text() == FILE


def test_a_full_disk_leaves_the_file(
    dashboard: Dashboard, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(dashboard())

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    answer = program.save(eviction__policy="none")
    assert answer.status_code == 503
    assert "nothing was saved" in answer.json()["error"]["message"]
    assert file.read_text() == FILE
    assert not list(file.parent.glob(".*.tmp"))


def test_secrets_are_nowhere(dashboard: Dashboard, file: Path) -> None:
    client = dashboard()
    program = Program(client)
    answers = [client.get("/configure").text, client.get("/api/configure").text]
    answers.append(str(program.check(security__namespace_salt="x", eviction__policy="none")))
    answers.append(program.save(eviction__policy="none").text)
    assert '"********"' not in FILE
    assert "namespace_salt: ********" in answers[2]
    for text in answers:
        assert "secret salt" not in text
        assert "another secret" not in text
    assert not any(key.name in ("namespace_salt", "auth_token")
                   for keys in form_keys().values() for key in keys)  # fmt: skip
    assert "secret salt" in file.read_text()


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "- 1\n",
        "storage: text\n",
        "x: &a {y: 1}\nz: *a\n",
        "\xff",
        "engine: {io_workers: 1}\nengine: {io_workers: 2}\n",
        "base: &b {policy: none}\neviction: *b\n",
    ],
)
def test_files_of_every_kind_are_answered_in_words(
    dashboard: Dashboard, home: Path, text: str
) -> None:
    (home / "lifeboat.yaml").write_bytes(text.encode("latin-1"))
    client = dashboard()
    assert client.get("/configure").status_code in (200, 409)
    program = Program(client)
    answer = program.save(eviction__policy="lru")
    assert answer.status_code in (409, 422)
    assert answer.json()["error"]["message"]


def test_anchors_are_not_changed_by_accident(home: Path) -> None:
    file = home / "lifeboat.yaml"
    file.write_text(
        "storage:\n  fallback_local: &limits {capacity_gb: 9, min_free_gb: 1}\n"
        "  tiers:\n  - {name: a, type: filesystem, path: /a, <<: *limits}\n"
    )
    editor = Editor(home, file, os.environ)
    proposal = editor.propose(editor.read(), {"storage.fallback_local.capacity_gb": "5"})
    assert "cannot be changed here" in proposal.problems[""]


def test_without_javascript_a_form_is_reviewed_and_then_saved(
    dashboard: Dashboard, file: Path
) -> None:
    client = dashboard()

    def fields(text: str) -> dict[str, str]:
        found = dict(re.findall(r'<input[^>]*name="([^"]+)"[^>]*?value="([^"]*)"', text))
        for name, body in re.findall(r'(?s)<select[^>]*name="([^"]+)"[^>]*>(.*?)</select>', text):
            chosen = re.search(r'<option value="([^"]*)" selected>', body)
            found[name] = chosen[1] if chosen else ""
        return {name: value for name, value in found.items() if "!remove" not in name}

    form = fields(client.get("/configure").text)
    assert form["storage.tiers.0.capacity_gb"] == "200G"
    same = client.post("/configure", data={**form, "action": "review"})
    assert "Nothing was changed." in same.text
    form["eviction.policy"] = "none"
    form["engine.io_workers"] = "none"
    wrong = client.post("/configure", data={**form, "action": "save"})
    assert wrong.status_code == 422
    assert "Allowed: a whole number from 1 to 64" in wrong.text
    form["engine.io_workers"] = ""
    review = client.post("/configure", data={**form, "action": "review"})
    assert "Is this right?" in review.text
    assert 'class="added">+  policy: none' in review.text
    assert file.read_text() == FILE
    done = client.post("/configure", data={**fields(review.text), "action": "save"})
    assert done.status_code == 303
    assert load_config(file).config.eviction.policy == "none"
    assert "Saved" in client.get(done.headers["location"]).text
    # Somebody who still has the old page loses nothing of what was typed.
    form["engine.io_workers"] = "3"
    late = client.post("/configure", data={**form, "action": "save"})
    assert late.status_code == 409
    assert 'value="3"' in late.text
    assert "changed in the meantime" in late.text
