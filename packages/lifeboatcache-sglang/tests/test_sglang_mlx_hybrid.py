"""Hybrid models on SGLang's MLX backend: a prefix comes back with the state at its end."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stored import stored_files

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mlx") is None or importlib.util.find_spec("sglang") is None,
    reason="needs SGLang and MLX: run `python3 tools/dev.py test sglang`",
)

OpenRig = Callable[..., Any]


@pytest.fixture
def rig(model: Path, home: Path) -> OpenRig:
    from sglang_mlx_rig import HybridRig

    return HybridRig


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 50_000, length)]


def stored(rig: OpenRig, *prompts: list[int]) -> None:
    with rig() as first:
        for tokens in prompts:
            first.serve(tokens)
        first.settle()


def test_a_prefix_comes_back_with_its_state(rig: OpenRig) -> None:
    tokens = prompt(1, 300)
    stored(rig, tokens)
    with rig() as second:
        request = second.wait(second.arrive(tokens))
        assert request.loaded == 256
        assert second.check(tokens) == 256
        assert second.begin(request) == 256
        second.finish(request)
        assert second.balanced()


def test_only_prefixes_whose_state_is_stored_come_back(rig: OpenRig) -> None:
    common = prompt(2, 200)
    one, other = common + prompt(3, 200), common + prompt(4, 200)
    stored(rig, one)
    with rig() as second:
        # The chunks that both begin with are there, the state behind them is not.
        request = second.wait(second.arrive(other))
        assert request.loaded == 0
        second.begin(request)
        second.finish(request)
        assert second.serve(one)[1] == 384
        assert second.balanced()


def test_a_longer_prompt_continues_from_a_stored_state(rig: OpenRig) -> None:
    tokens = prompt(5, 200)
    longer = tokens + prompt(6, 300)
    stored(rig, tokens, longer)
    with rig() as second:
        request = second.wait(second.arrive([*tokens, *prompt(7, 100)]))
        assert request.loaded == 192
        second.begin(request)
        second.finish(request)
        assert second.balanced()


def test_several_requests_come_one_after_the_other_and_cancelled_ones_let_go(
    rig: OpenRig,
) -> None:
    prompts = [prompt(10 + number, 260) for number in range(4)]
    stored(rig, *prompts)
    with rig(slots=1300) as second:
        waiting = [second.arrive(tokens) for tokens in prompts]
        assert not second.poll(waiting[0])
        assert not second.poll(waiting[1])
        second.cache.release_aborted_request(waiting[0].cache_request_handle)
        for request, tokens in zip(waiting[1:], prompts[1:], strict=True):
            second.wait(request)
            assert request.loaded == 256
            assert second.check(tokens) == 256
        assert second.check(prompts[0]) == 0
        assert not second.cache.has_pending_cache_operations()
        assert second.balanced()


def test_a_state_that_does_not_match_its_checksum_is_not_used(rig: OpenRig, home: Path) -> None:
    from sglang_mlx_rig import _arrays, state_of

    tokens = prompt(20, 200)
    stored(rig, tokens)
    sample = _arrays(state_of(tokens[:192]))[1].tobytes()
    flipped = 0
    for path in stored_files(home, "segment"):
        data = path.read_bytes()
        place = data.find(sample)
        if place >= 0:
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            flipped += 1
    assert flipped == 1
    with rig() as second:
        assert second.wait(second.arrive(tokens)).loaded == 0
        assert second.balanced()


def test_states_are_brought_back_as_they_were(rig: OpenRig) -> None:
    from sglang_mlx_rig import _arrays, state_of

    from lifeboat_cache.integrations.sglang_mlx_state import read_state, write_state

    before = state_of([1, 2, 3])
    data = write_state(before)
    after = read_state(data)
    assert sorted(after) == sorted(before)
    for layer, one in after.items():
        assert one.state[1:] == (None, None)
        assert one.meta_state == before[layer].meta_state
        assert one.attrs == before[layer].attrs
    for got, expected in zip(_arrays(after), _arrays(before), strict=True):
        np.testing.assert_array_equal(got, expected)
    for broken in (data[:-1], data[:40], np.zeros(64, dtype=np.uint8)):
        with pytest.raises(ValueError):  # noqa: PT011
            read_state(broken)
    before[0].attrs["lengths"] = 1.5
    with pytest.raises(ValueError, match="a float"):
        write_state(before)
