"""Model directories, the Hub cache, adapters and the files beside the weights."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_llama
from safetensors_file import bfloat16, write_file

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.identity import (
    PROCESSOR_FILES,
    adapter_identity,
    digest_code,
    digest_files,
    hub_cache_dir,
    process_start_time,
    resolve_model_dir,
    weights_identity,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "hub"
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    return cache


def add_snapshot(
    cache: Path, name: str, commit: str, ref: str | None = None, seed: int = 0
) -> Path:
    repository = cache / ("models--" + name.replace("/", "--"))
    snapshot = repository / "snapshots" / commit
    tiny_llama.write(repository / "blobs" / commit, seed=seed)
    snapshot.mkdir(parents=True)
    for blob in (repository / "blobs" / commit).iterdir():
        (snapshot / blob.name).symlink_to(blob)
    if ref:
        (repository / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    return snapshot


def test_a_local_directory_is_taken_as_it_is(tmp_path: Path, hub: Path) -> None:
    assert resolve_model_dir(str(tmp_path)) == tmp_path
    assert resolve_model_dir(str(tmp_path), revision="anything") == tmp_path


def test_a_hub_id_is_found_in_the_cache_by_branch_tag_and_commit(hub: Path) -> None:
    main = add_snapshot(hub, "org/name", COMMIT, "main")
    pull = add_snapshot(hub, "org/name", OTHER, "refs/pr/1")
    assert resolve_model_dir("org/name") == main
    assert resolve_model_dir("org/name", "main") == main
    assert resolve_model_dir("org/name", "refs/pr/1") == pull
    assert resolve_model_dir("org/name", OTHER) == pull
    assert resolve_model_dir("org/name", "main", commit=OTHER) == pull, "the branch has moved since"
    assert weights_identity(main).digest == weights_identity(pull).digest


def test_a_hub_id_is_found_in_a_download_directory(hub: Path, tmp_path: Path) -> None:
    snapshot = add_snapshot(tmp_path / "elsewhere", "name", COMMIT, "main")
    assert resolve_model_dir("name", download_dir=str(tmp_path / "elsewhere")) == snapshot
    with pytest.raises(IdentityError, match="Hub cache"):
        resolve_model_dir("name")


@pytest.mark.parametrize(
    "revision", ["v2", "../../../other", "/etc/hostname", OTHER], ids=["tag", "up", "abs", "commit"]
)
def test_an_absent_revision_is_refused(hub: Path, revision: str) -> None:
    add_snapshot(hub, "org/name", COMMIT, "main")
    with pytest.raises(IdentityError, match=r"org/name.*download it there"):
        resolve_model_dir("org/name", revision)


def test_a_branch_that_does_not_hold_a_commit_is_refused(hub: Path) -> None:
    add_snapshot(hub, "org/name", COMMIT, "main")
    tiny_llama.write(hub / "models--org--name" / "snapshots" / "mine")
    (hub / "models--org--name" / "refs" / "main").write_text("mine")
    with pytest.raises(IdentityError, match="download it there"):
        resolve_model_dir("org/name")


@pytest.mark.parametrize("name", ["../x", "a/b/c", "s3://bucket/model", "-x", "a--b/c", ""])
def test_what_is_no_model_is_refused(
    hub: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # whatever lies beside the checkout
    with pytest.raises(IdentityError, match="local"):
        resolve_model_dir(name)


def test_the_cache_directory_follows_the_hub_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub_cache_dir() == tmp_path / ".cache/huggingface/hub"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert str(hub_cache_dir()) == "/xdg/huggingface/hub"
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert hub_cache_dir() == tmp_path / "hf/hub"
    monkeypatch.setenv("HF_HUB_CACHE", "/hub")
    assert str(hub_cache_dir()) == "/hub"


def write_adapter(
    directory: Path,
    seed: int = 0,
    rank: int = 4,
    config: str = '{"r": 4, "base_model_name_or_path": "x"}',
) -> Path:
    random = np.random.default_rng(seed)
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(config)
    write_file(
        directory / "adapter_model.safetensors",
        {"lora_A": bfloat16(random.normal(size=(rank, 40_000)))},
    )
    return directory


def test_an_adapter_is_known_by_content(tmp_path: Path) -> None:
    one = adapter_identity(write_adapter(tmp_path / "a"))
    same = adapter_identity(
        write_adapter(tmp_path / "b", config='{"base_model_name_or_path": "y",  "r": 4}')
    )
    assert one.digest == same.digest
    assert one.weights.bytes_sampled == 4 * 40_000 * 2, "read whole"
    assert one.digest != adapter_identity(write_adapter(tmp_path / "a", seed=1)).digest
    assert one.digest != adapter_identity(write_adapter(tmp_path / "a", config='{"r": 8}')).digest


def test_one_changed_byte_of_an_adapter_is_seen(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a")
    before = adapter_identity(directory).digest
    path = directory / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[100_001] ^= 1
    path.write_bytes(data)
    assert adapter_identity(directory).digest != before


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match=r"adapter_config\.json"):
        adapter_identity(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[[[")
    with pytest.raises(IdentityError, match=r"adapter_model\.safetensors"):
        adapter_identity(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"x" * 10)
    with pytest.raises(IdentityError, match="not an adapter's configuration"):
        adapter_identity(tmp_path)


def test_side_files_are_digested_by_name(tmp_path: Path) -> None:
    assert digest_files(tmp_path, PROCESSOR_FILES) == {}
    (tmp_path / "preprocessor_config.json").write_text('{"size": 224}')
    before = digest_files(tmp_path, PROCESSOR_FILES)
    assert list(before) == ["preprocessor_config.json"]
    (tmp_path / "preprocessor_config.json").write_text('{"size": 336}')
    assert digest_files(tmp_path, PROCESSOR_FILES) != before


def test_code_that_a_model_brings_along_is_digested(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "modeling_x.py").write_text("a = 1")
    (tmp_path / "sub/rope.py").write_text("b = 1")
    (tmp_path / ".git/hook.py").write_text("c = 1")
    before = digest_code(tmp_path)
    assert sorted(before) == ["modeling_x.py", os.path.join("sub", "rope.py")]
    (tmp_path / "sub/rope.py").write_text("b = 2")
    assert digest_code(tmp_path) != before


def test_too_many_python_files_are_refused(tmp_path: Path) -> None:
    for number in range(1001):
        (tmp_path / f"m{number}.py").touch()
    with pytest.raises(IdentityError, match="directory of its own"):
        digest_code(tmp_path)


def test_a_process_knows_when_it_started() -> None:
    started = process_start_time()
    assert started is not None
    assert started <= time.time()
    first = process_start_time(1)
    assert first is not None
    assert first <= started + 1
    assert process_start_time(1 << 30) is None
