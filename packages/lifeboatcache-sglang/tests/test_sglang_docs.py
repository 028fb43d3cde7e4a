"""The page about SGLang says what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

from lifeboat_cache.integrations import sglang_memory, sglang_settings
from lifeboat_cache.integrations.sglang_activation import BACKEND_CLASS, BACKEND_MODULE
from lifeboat_cache.integrations.sglang_memory import size_host_pool
from lifeboat_cache.integrations.sglang_settings import WRITE_POLICIES
from lifeboat_cache.integrations.sglang_versions import TESTED

PAGE = (Path(__file__).parents[3] / "docs" / "sglang.md").read_text(encoding="utf-8")
GB = 1_000_000_000


def test_every_variable_is_described_and_no_other() -> None:
    values = {getattr(sglang_settings, name) for name in sglang_settings.__all__ if name.isupper()}
    known = {value for value in values if str(value).startswith("LIFEBOAT_SGLANG_")}
    assert len(known) == 5
    assert set(re.findall(r"LIFEBOAT_SGLANG_[A-Z_]+", PAGE)) == known


def test_the_explicit_configuration_names_our_backend() -> None:
    (text,) = re.findall(r"--hicache-storage-backend-extra-config '(\{.*?\})'", PAGE, re.DOTALL)
    assert json.loads(text) == {
        "backend_name": "lifeboat",
        "module_path": BACKEND_MODULE,
        "class_name": BACKEND_CLASS,
    }


def test_the_defaults() -> None:
    tokens, staging = sglang_settings.DEFAULT_PAGE_SIZE, sglang_settings.DEFAULT_STAGING_TOKENS
    assert f"| tokens per page | {tokens}," in PAGE
    assert f"at most {staging:,} tokens" in PAGE
    for policy in WRITE_POLICIES:
        assert f"| `{policy}`" in PAGE
    for release in TESTED:
        assert f"| {release} |" in PAGE


def test_the_size_of_the_host_pool() -> None:
    def size(available: int) -> float:
        return size_host_pool(None, 1, {"available memory": available * GB}).bytes / GB

    assert "10% of the available memory, within 2 to 16 GB per rank" in PAGE
    assert [size(18), size(50), size(500)] == [2, 5, 16]
    assert sglang_memory.RESERVE_BYTES == 10 << 30
    assert "does not leave 10 GiB free" in PAGE
    assert sglang_memory._RANK_BYTES == 3 << 30
    assert "with 3 GiB\n  kept for each rank" in PAGE
    assert sglang_memory.MINIMUM_BYTES == 1 << 28
    assert "below 0.25 GiB per rank" in PAGE


def test_the_example_of_a_pool_adds_up() -> None:
    token = 2 * 32 * 8 * 128 * 2  # K and V, layers, heads, their size, bfloat16
    assert f"{token:,} bytes for a Llama of 32 layers" in PAGE
    assert 2 * GB // token == 15_258
    assert 16 * GB // token == 122_070
    assert "2 GB hold 15,000 tokens and 16 GB 122,000" in PAGE
    assert round(token * 10_000 / GB, 1) == 1.3
    assert "writes 1.3 GB/s" in PAGE
    # SGLang waits 0.25 s for each 1,024 tokens.
    assert round(token * 1024 / 0.25 / GB, 2) == 0.54
    assert "deliver\n0.54 GB/s" in PAGE
