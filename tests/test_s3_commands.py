"""The commands on a bucket of a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_objects import Shelf
from s3_server import READER_KEY, S3Server

from lifeboat_cache.cli.main import main
from lifeboat_cache.keys import salt_tag
from lifeboat_cache.namespace import Namespace
from lifeboat_cache.s3 import checking
from lifeboat_cache.s3.archive import Archive
from lifeboat_cache.s3.client import S3Client
from lifeboat_cache.s3.settings import S3Settings

BLOCK = 65_536

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bucket(s3: S3Server) -> str:
    return s3.new_bucket()


@pytest.fixture
def home(tmp_path: Path, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    made = tmp_path / "home"
    made.mkdir()
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(made))
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    tier = {"name": "archive", "type": "s3", "bucket": bucket, "endpoint_url": s3.endpoint,
            "prefix": "cache", "capacity_gb": 0.0024}  # fmt: skip
    document = {"storage": {"tiers": [tier], "fallback_local": {"enabled": False}}}
    (made / "lifeboat.yaml").write_text(json.dumps(document))
    return made


@pytest.fixture
def shelf(tmp_path: Path, s3: S3Server, bucket: str, home: Path) -> Iterator[Shelf]:
    settings = S3Settings("x", tmp_path / "x", bucket, endpoint_url=s3.endpoint)
    archive = Archive(settings)
    namespace = Namespace.from_identity({"engine": "test", "model": "small"}, {"model": "Small"})
    yield Shelf(archive.client, "cache", namespace)
    archive.close()


@pytest.fixture
def run(home: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        code = main([*words])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def findings(out: str) -> list[tuple[str, bool]]:
    (target,) = json.loads(out)["targets"][:1]
    found = [f for n in target["namespaces"] for f in n["findings"]]
    return sorted((f["kind"], f["repaired"]) for f in found)


def test_ls_shows_what_the_bucket_holds(run: Run, shelf: Shelf, bucket: str) -> None:
    shelf.segment(range(4))
    shelf.segment(range(4, 6))
    code, out, err = run("ls")
    assert (code, err) == (0, "")
    assert f"archive: s3://{bucket}/cache at http://" in out
    assert "of 2.4 MB used" in out
    assert "Small" in out
    assert " free" not in out.splitlines()[0]
    code, out, _ = run("ls", "--json")
    (target, *_) = json.loads(out)["targets"]
    assert target["usage"]["used"] > 6 * BLOCK
    assert [one["blocks"] for one in target["namespaces"]] == [6]


def test_purge_by_salt_age_and_namespace_is_gone_from_the_bucket(
    run: Run, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lifeboat_cache.cli.purge_command.time.sleep", lambda _: None)
    shelf.segment(range(4), age_s=10_000)
    shelf.segment(range(4, 8), age_s=100)
    shelf.segment([8, 9], salt=salt_tag("tenant"))
    code, out, _ = run("purge", "--salt", "tenant", "--dry-run")
    assert (code, shelf.segments()) == (0, 3)
    assert "would remove 2 single blocks" in out
    code, out, err = run("purge", "--salt", "tenant", "--yes")
    assert code == 0, err
    assert "removed 2 single blocks" in out
    assert shelf.held() == list(range(8))
    assert run("purge", "--all", "--older-than", "1h", "--yes")[0] == 0
    assert shelf.held() == [4, 5, 6, 7]
    name = shelf.namespace.hex[:6]
    assert run("purge", "--namespace", name, "--yes")[0] == 0
    assert (shelf.held(), shelf.segments()) == ([], 0)
    # What stays tells other nodes that it is gone.
    left = [one.key for one in shelf.client.objects(f"cache/{shelf.folder}/")]
    assert left
    assert all(key.endswith(".gone") for key in left)
    _, out, _ = run("ls")
    assert "nothing is stored here" in out


def test_purge_without_permission_says_so(
    run: Run, shelf: Shelf, s3: S3Server, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    shelf.segment([0])
    for name, value in s3.environment(READER_KEY).items():
        monkeypatch.setenv(name, value)
    config = json.loads((home / "lifeboat.yaml").read_text())
    config["storage"]["tiers"][0]["name"] = "another"  # with credentials of its own
    (home / "lifeboat.yaml").write_text(json.dumps(config))
    code, _, err = run("purge", "--all", "--yes")
    assert code == 2
    assert "AccessDenied" in err
    assert shelf.held() == [0]


def test_gc_makes_room(run: Run, shelf: Shelf) -> None:
    for number in range(3):
        shelf.segment(range(16 * number, 16 * number + 16), age_s=9000 - number)
    code, out, err = run("gc", "--dry-run")
    assert (code, shelf.segments()) == (0, 3)
    assert "would evict" in out
    code, out, err = run("gc", "--json")
    assert code == 0, err
    (document,) = json.loads(out)["targets"]
    assert document["location"].startswith("s3://")
    assert document["report"]["segments_removed"] == 1
    assert document["report"]["requests"]["delete"] == 2
    assert shelf.held() == list(range(16, 48))


def test_check_finds_and_mends(run: Run, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.segment(range(4))
    spoiled = shelf.segment(range(4, 8), spoiled=[5, 6])
    lost = shelf.segment([8])
    torn = shelf.segment([9, 10, 11])
    shelf.segment([12], named=False)
    shelf.client.delete([shelf.names.segment(shelf.folder, lost.writer, 0)])
    key = shelf.names.in_feed(shelf.folder, torn)
    data = bytearray(shelf.client.get(key))
    data[4096 + 128 + 5] ^= 1
    shelf.client.put(key, bytes(data))
    code, out, _ = run("check", "--json")
    assert code == 1
    assert findings(out) == [
        ("entry-bad", False),
        ("orphan-segment", False),
        ("record-corrupt", False),
        ("segment-missing", False),
    ]
    records = json.loads(out)["targets"][0]["namespaces"][0]["records"]
    assert (records["verified"], records["bad"]) == (4 + 2 + 2, 2)
    monkeypatch.setattr(checking, "ORPHAN_S", -5.0)
    code, out, _ = run("check", "--repair", "--json")
    assert code == 1
    assert all(repaired for _, repaired in findings(out))
    code, out, _ = run("check")
    assert code == 0, out
    assert "Nothing is wrong." in out
    assert shelf.held() == [*range(4), 4, 7, 9, 11]
    assert shelf.segments() == 3
    assert spoiled in shelf.feed()


@pytest.mark.parametrize("when", ["before it is looked for", "while it is read"])
def test_check_calls_nothing_wrong_that_was_evicted_meanwhile(
    run: Run, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    shelf.segment(range(4))
    evicted = shelf.segment(range(4, 8))
    segment = shelf.names.segment(shelf.folder, evicted.writer, 0)
    read, objects = S3Client.read, S3Client.objects

    def evict() -> None:
        shelf.client.delete([shelf.names.in_feed(shelf.folder, evicted)])
        shelf.client.delete([segment])

    def reading(client: S3Client, key: str, *rest: Any) -> None:
        if key == segment:
            evict()
        read(client, key, *rest)

    def listing(client: S3Client, prefix: str, *rest: Any) -> Any:
        if prefix.endswith("/segments/"):
            evict()
        return objects(client, prefix, *rest)

    with monkeypatch.context() as patch:
        if when == "while it is read":
            patch.setattr(S3Client, "read", reading)
        else:
            patch.setattr(S3Client, "objects", listing)
        code, out, _ = run("check", "--repair", "--json")
    assert (code, findings(out)) == (0, [])
    records = json.loads(out)["targets"][0]["namespaces"][0]["records"]
    assert (records["verified"], records["dead"], records["bad"]) == (4, 4, 0)


def test_check_deletes_no_orphan_that_a_second_listing_names(
    run: Run, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "ORPHAN_S", -5.0)
    late = shelf.segment([1])
    shelf.segment([2], named=False)
    objects, left_out = S3Client.objects, True

    def lagging(client: S3Client, prefix: str, *rest: Any) -> Any:
        nonlocal left_out
        if prefix.endswith("/segments/"):  # what they are has been listed before
            left_out = False
        for one in objects(client, prefix, *rest):
            if not (left_out and one.key.endswith(str(late))):
                yield one

    with monkeypatch.context() as patch:
        patch.setattr(S3Client, "objects", lagging)
        _, out, _ = run("check", "--repair", "--json")
    assert [kind for kind, _ in findings(out)] == ["orphan-segment"] * 2
    assert (shelf.held(), shelf.segments()) == ([1], 1)


def test_all_directories_before_one_bucket_are_looked_at(
    run: Run, home: Path, shelf: Shelf, tmp_path: Path
) -> None:
    config = json.loads((home / "lifeboat.yaml").read_text())
    (tier,) = config["storage"]["tiers"]
    config["storage"]["tiers"] = [
        {**tier, "name": name, "path": str(tmp_path / name)} for name in ("one", "two")
    ]
    (home / "lifeboat.yaml").write_text(json.dumps(config))
    for name in ("one", "two"):
        (tmp_path / name / "staging").mkdir(parents=True)
    _, out, _ = run("ls", "--json")
    names = [target["name"] for target in json.loads(out)["targets"]]
    assert names[:3] == ["one", "one.staging", "two.staging"]


def test_check_of_a_slice_that_cannot_be_read(run: Run, shelf: Shelf) -> None:
    shelf.segment([0])
    name = shelf.segment([1])
    shelf.client.put(shelf.names.in_feed(shelf.folder, name), b"no journal" * 1000)
    code, out, _ = run("check", "--repair", "--json")
    assert code == 1
    assert findings(out) == [("slice-damaged", True)]
    assert run("check")[0] == 0
    assert (shelf.held(), shelf.segments()) == ([0], 1)


@pytest.mark.parametrize("at", [5, 4096 + 128 + 5])
def test_check_drops_nothing_that_was_damaged_on_its_way(
    run: Run, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    shelf.segment(range(4))
    get, read = S3Client.get, 0

    def damaged(client: S3Client, key: str) -> bytes:
        nonlocal read
        data = bytearray(get(client, key))
        if key.endswith(".journal"):
            read += 1
            if read == 2:  # the first time it is read to find out what there is
                data[at] ^= 1
        return bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr(S3Client, "get", damaged)
        assert run("check", "--repair")[0] == 0
    assert (shelf.held(), shelf.segments()) == ([*range(4)], 1)


def test_commands_say_what_is_wrong_with_a_bucket(
    run: Run, home: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((home / "lifeboat.yaml").read_text())
    config["storage"]["tiers"][0] |= {"bucket": "no-such-bucket", "name": "gone"}
    (home / "lifeboat.yaml").write_text(json.dumps(config))
    for command in (["ls"], ["check"], ["gc"], ["purge", "--all", "--yes"]):
        code, _, err = run(*command)
        assert code == 2, command
        assert "the bucket does not exist" in err, command


def doctor(run: Run) -> dict[str, dict[str, Any]]:
    _, out, _ = run("doctor", "--json")
    found = json.loads(out)["checks"]
    return {one["name"]: one for one in found if one["name"].startswith("target ")}


def test_doctor_puts_reads_and_deletes(
    run: Run, home: Path, shelf: Shelf, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.segment([0])
    before = sorted(one.key for one in shelf.client.objects(""))
    found = doctor(run)
    assert found["target archive: bucket"]["status"] == "ok"
    assert found["target archive: clock"]["status"] == "ok"
    assert "can wait at" in found["target archive: waiting room"]["summary"]
    # It leaves nothing behind, and makes nothing.
    assert sorted(one.key for one in shelf.client.objects("")) == before
    assert not (home / "s3").exists()
    for name, value in s3.environment(READER_KEY).items():
        monkeypatch.setenv(name, value)
    found = doctor(run)
    assert found["target archive: bucket"]["status"] == "fail"
    assert "AccessDenied" in found["target archive: bucket"]["summary"]
