"""What the tier remembers of a request: one question for all of its keys."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm_tiering import offload_keys

from lifeboat_cache.integrations import vllm_requests
from lifeboat_cache.integrations.vllm_requests import RequestKeys, split_key
from lifeboat_cache.interface import Lookup, block_keys, tag


class Store:
    """Answers like a store, and remembers what it was asked."""

    def __init__(self, there: Sequence[bytes] = (), otherwise: Lookup = Lookup.MISS) -> None:
        self.there = set(block_keys(there))
        self.otherwise = otherwise
        self.questions: list[int] = []

    def lookup(self, keys: list[bytes]) -> Any:
        self.questions.append(len(keys))
        answers = [Lookup.HIT if key in self.there else self.otherwise for key in keys]
        return np.array(answers, dtype=np.uint8)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(vllm_requests, "time", made)
    return made


def request(keys: Sequence[bytes]) -> RequestKeys:
    positions = {key: 128 * (number + 1) for number, key in enumerate(keys)}
    return RequestKeys(SimpleNamespace(_offload_key_positions=positions), b"", 1000)


def look(one: RequestKeys, keys: Sequence[bytes], step: int, store: Store) -> list[int]:
    return [one.answer(key, step, store.lookup) for key in keys]


def test_the_store_is_asked_once_for_all_keys_of_a_request(clock: Clock) -> None:
    keys = offload_keys(50)
    store, one = Store(keys[:30]), request(keys)
    expected = [Lookup.HIT] * 30 + [Lookup.MISS] * 20
    assert look(one, keys, 0, store) == expected
    assert look(one, keys, 0, store) == expected
    assert look(one, keys, 1, store) == expected
    assert store.questions == [50]


def test_hits_stand_and_misses_are_asked_for_again_after_a_while(clock: Clock) -> None:
    keys = offload_keys(10)
    store, one = Store(keys[:4]), request(keys)
    look(one, keys, 0, store)
    store.there = set(block_keys(keys[2:7]))
    clock.now += 5
    assert look(one, keys, 0, store)[4] == Lookup.MISS, "within a step an answer stands"
    assert look(one, keys, 1, store) == [Lookup.HIT] * 7 + [Lookup.MISS] * 3
    assert store.questions == [10, 6]
    store.there = set(block_keys(keys))
    clock.now += 5
    assert look(one, keys, 2, store) == [Lookup.HIT] * 10
    clock.now += 5000
    look(one, keys, 3, store)
    assert store.questions == [10, 6, 3], "everything is known for the rest of the request"


def test_answers_that_are_not_final_are_asked_for_again_soon(clock: Clock) -> None:
    keys = offload_keys(10)
    store, one = Store(keys[:4], otherwise=Lookup.RETRY), request(keys)
    assert look(one, keys, 0, store)[-1] == Lookup.RETRY
    store.otherwise = Lookup.MISS
    assert look(one, keys, 1, store)[-1] == Lookup.RETRY, "steps without work are short"
    clock.now += 0.05
    assert look(one, keys, 2, store)[-1] == Lookup.MISS
    clock.now += 0.05
    look(one, keys, 3, store)
    assert store.questions == [10, 6]


def test_keys_that_come_later_are_asked_for_alone(clock: Clock) -> None:
    keys, more = offload_keys(5), offload_keys(2, seed=4)
    store, one = Store([*keys, *more]), request(keys)
    look(one, keys, 0, store)
    for number, key in enumerate(more):
        one.positions()[key] = 5000 + number
    assert look(one, more, 0, store) == [Lookup.HIT] * 2
    (unknown,) = offload_keys(1, seed=6)
    assert look(one, [unknown], 0, store) == [Lookup.MISS]
    assert store.questions == [5, 2, 1]


def test_without_recorded_positions_each_key_is_asked_for_on_its_own(clock: Clock) -> None:
    keys = offload_keys(3)
    store, one = Store(keys), RequestKeys(SimpleNamespace(), b"", 1000)
    assert look(one, keys, 0, store) == [Lookup.HIT] * 3
    assert store.questions == [1, 1, 1]


def test_what_could_not_be_loaded_is_a_miss_for_the_rest_of_the_request(clock: Clock) -> None:
    keys = offload_keys(5)
    store, one = Store(keys), request(keys)
    look(one, keys, 0, store)
    one.forget(keys[1:3])
    clock.now += 5000  # another process may have stored them meanwhile
    expected = [Lookup.HIT, Lookup.MISS, Lookup.MISS, Lookup.HIT, Lookup.HIT]
    assert look(one, keys, 1, store) == expected


def naive_facts(known: dict[bytes, int]) -> dict[bytes, tuple[int, int, int, int]]:
    """Position, group, family and parent of every key, one by one."""
    out = {}
    for key, position in known.items():
        value, group = split_key(key)
        before = [
            (at, split_key(other)[0])
            for other, at in known.items()
            if split_key(other)[1] == group and at < position
        ]
        out[key] = (position, group, tag(value), tag(max(before)[1]) if before else 0)
    return out


@pytest.mark.parametrize("order", ["prompt", "backwards", "mixed", "late"])
def test_relations_do_not_depend_on_the_order_in_which_keys_are_recorded(order: str) -> None:
    prompt = {
        key: 128 * (number + 1)
        for group in (0, 1, 2)
        for number, key in enumerate(offload_keys(12, seed=group, group=group))
    }
    names = list(prompt)
    if order == "backwards":
        names.reverse()
    elif order == "mixed":
        np.random.default_rng(3).shuffle(names)
    known: dict[bytes, int] = {}
    one = RequestKeys(SimpleNamespace(_offload_key_positions=known), b"", 1000)
    for at in range(0, 36, 36 if order == "prompt" else 9):
        part = names[at : at + (36 if order == "prompt" else 9)]
        known.update((key, prompt[key]) for key in part)
        one.facts(part)
    wanted = [*names[::-2], *offload_keys(1, seed=50, group=3)]
    facts = one.facts(wanted)
    expected = naive_facts(prompt)
    (unknown,) = wanted[-1:]
    expected[unknown] = (0, 3, tag(split_key(unknown)[0]), 0)
    found = zip(facts.positions, facts.groups, facts.families, facts.parents, strict=True)
    assert dict(zip(wanted, found, strict=True)) == {key: expected[key] for key in wanted}
