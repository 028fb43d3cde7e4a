"""Configuration objects as JSON values."""

import dataclasses
import enum
import functools
import json
import math
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

import pytest

from lifeboat_cache.errors import IdentityError
from lifeboat_cache.identity import jsonable
from lifeboat_cache.namespace import canonical_json


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Spec:
    block_size: int
    inner: object = None


@dataclasses.dataclass(frozen=True)
class OtherSpec:
    block_size: int
    inner: object = None


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value

    def read(self) -> object:
        return self.value


class ToDict:
    def to_dict(self) -> dict[str, float]:
        return {"rope_theta": 1e4}


class Nameless:
    __slots__ = ()


def function() -> int:
    return 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (7, 7),
        (1.5, 1.5),
        (math.inf, "inf"),
        ("x", "x"),
        (Colour.RED, "Colour.RED"),
        ((1, [2]), [1, [2]]),
        ({3, 1, 2}, [1, 2, 3]),
        ({1: "a", Colour.RED.name: "b"}, {"1": "a", "RED": "b"}),
        (b"\x01", {"()": "bytes", "hex": "01"}),
        (PurePosixPath("/a/b"), "/a/b"),
        (
            Spec(4, Spec(8)),
            {
                "()": "Spec",
                "block_size": 4,
                "inner": {"()": "Spec", "block_size": 8, "inner": None},
            },
        ),
        (Plain(3), {"()": "Plain", "value": 3}),
        (ToDict(), {"()": "ToDict", "rope_theta": 1e4}),
        (Fraction(1, 4), {"()": "Fraction", "repr": "Fraction(1, 4)"}),
    ],
)
def test_values_with_a_spelling(value: Any, expected: Any) -> None:
    found = jsonable(value)
    assert found == expected
    assert type(found) is type(expected)
    assert json.loads(canonical_json({"v": found})) == {"v": found}


def test_classes_with_equal_fields_differ() -> None:
    assert jsonable(Spec(4)) != jsonable(OtherSpec(4))


def test_classes_and_functions_are_their_names() -> None:
    assert jsonable(Spec).endswith(":Spec")
    assert jsonable(function).endswith(":function")


def test_dicts_and_sets_do_not_depend_on_order() -> None:
    one = jsonable({"a": {"x", "y", "z"}, "b": 1})
    other = jsonable({"b": 1, "a": {"z", "y", "x"}})
    assert canonical_json(one) == canonical_json(other)


@pytest.mark.parametrize(
    "value",
    [
        lambda: 1,
        functools.partial(function),
        Nameless(),
        Plain(Nameless()),
        Plain(1).read,
        {1: "a", "1": "b"},
    ],
    ids=["lambda", "partial", "address", "nested", "bound", "keys"],
)
def test_what_has_no_spelling_of_its_own_is_refused(value: Any) -> None:
    with pytest.raises(IdentityError, match=r"config\.x"):
        jsonable({"x": value}, "config")


def test_what_holds_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(IdentityError, match="holds itself"):
        jsonable(loop)
