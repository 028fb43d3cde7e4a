"""The integrity key: its file, its name, and which namespaces it leads to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from blake3 import blake3

from lifeboat_cache.config import load_config
from lifeboat_cache.errors import ConfigError
from lifeboat_cache.integrity import (
    IntegrityKey,
    configured_integrity_key,
    load_integrity_key,
    namespace_with_integrity,
)
from lifeboat_cache.namespace import Namespace

BYTES = bytes(range(200, 232))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "integrity.key"
    path.write_bytes(BYTES)
    path.chmod(0o600)
    return path


def test_the_key_is_what_the_format_says(key_file: Path) -> None:
    key = load_integrity_key(key_file)
    secret = blake3(BYTES, derive_key_context="lifeboatcache 2026 integrity key v1").digest()
    name = blake3(secret, derive_key_context="lifeboatcache 2026 integrity key id v1").digest(8)
    assert (key.secret, key.id) == (secret, name.hex())
    assert len(key.secret) == 32


@pytest.mark.parametrize(
    "content",
    [
        BYTES.hex().encode(),
        BYTES.hex().upper().encode() + b"\n",
        b"  " + BYTES.hex().encode() + b" \r\n",
    ],
)
def test_hexadecimal_digits_mean_the_bytes(content: bytes) -> None:
    assert IntegrityKey.from_content(content) == IntegrityKey.from_content(BYTES)


@pytest.mark.parametrize("content", [b"f" * 32, b"f" * 65, BYTES + b"\n", b"words" * 20])
def test_everything_else_is_taken_as_it_is(content: bytes) -> None:
    context = "lifeboatcache 2026 integrity key v1"
    expected = blake3(content, derive_key_context=context).digest()
    assert IntegrityKey.from_content(content).secret == expected


def test_the_secret_is_not_shown(key_file: Path) -> None:
    key = load_integrity_key(key_file)
    for text in (repr(key), str(key), f"{key}"):
        assert str(key.secret) not in text
        assert key.secret.hex() not in text
        assert key.id in text


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o601])
def test_a_file_that_others_can_use_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"run: chmod 600 {key_file}$"):
        load_integrity_key(key_file)
    key_file.chmod(0o400)
    assert load_integrity_key(key_file) == IntegrityKey.from_content(BYTES)


def test_a_file_of_another_user_is_refused(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.stat(key_file).st_uid
    if not owner:
        os.chown(key_file, 12_345, -1)
        owner = 12_345
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=rf"belongs to user {owner}: run: chown {owner + 1}"):
        load_integrity_key(key_file)


@pytest.mark.parametrize("size", [0, 1, 31, 65_537])
def test_a_file_of_the_wrong_size_is_refused(key_file: Path, size: int) -> None:
    key_file.write_bytes(bytes(size))
    with pytest.raises(ConfigError, match=r"name another file; a new one is made by: "):
        load_integrity_key(key_file)


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path in (pipe, tmp_path):
        with pytest.raises(ConfigError, match="is not a file: name the key's file"):
            load_integrity_key(path)
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file.*a new one is made by"):
        load_integrity_key(tmp_path / "none")


def test_a_key_leads_to_a_namespace_of_its_own() -> None:
    namespace = Namespace.from_identity({"model": "m"}, display={"name": "M"})
    first, second = (IntegrityKey.from_content(bytes([n]) * 32) for n in (1, 2))
    assert namespace_with_integrity(namespace, None) is namespace
    mine, other = (namespace_with_integrity(namespace, key) for key in (first, second))
    assert len({namespace.digest, mine.digest, other.digest}) == 3
    assert mine.identity == {"model": "m", "integrity_key": first.id}
    assert mine.display == {"name": "M"}
    assert namespace_with_integrity(namespace, first) == mine


def test_the_configuration_names_the_file(key_file: Path, tmp_path: Path) -> None:
    config = tmp_path / "lifeboat.yaml"
    config.write_text(f"security:\n  integrity_key: {key_file}\n")
    assert configured_integrity_key(load_config(config).config) == load_integrity_key(key_file)
    config.write_text("")
    assert configured_integrity_key(load_config(config).config) is None
