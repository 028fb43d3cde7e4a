"""Configuration objects as plain JSON values, for identity documents.

Engines describe a model with dataclasses, enums, dtypes and objects of their
own, and new ones appear with every release. Whatever has one clear spelling is
written; what has none (a lambda, an object that only its address tells apart)
is refused, because two different things would look the same.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from lifeboat_cache.errors import IdentityError

__all__ = ["jsonable", "qualified_name"]

_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_MAX_DEPTH = 32


def qualified_name(value: object) -> str:
    """``module:qualname`` of a class or function."""
    module = getattr(value, "__module__", None) or "?"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", "?")
    return f"{module}:{name}"


def _refuse(where: str, value: object, why: str) -> IdentityError:
    return IdentityError(
        f"{where}: a {type(value).__name__} {why}, so it cannot be told from another: "
        "set it to a plain value, or report this with the engine's version"
    )


def jsonable(value: object, where: str = "value") -> Any:
    """Turn a value into JSON types.

    Parameters
    ----------
    value
        Plain values, containers, enums, dataclasses, pydantic models, objects
        with a ``to_dict``, torch dtypes, classes, module-level functions, and
        objects whose attributes are such.
    where
        What it is, for errors.

    Returns
    -------
    object
        ``None``, bool, int, float, str, list or dict with string keys.
        Non-finite floats become strings, sets sorted lists, objects mappings
        with their class under ``"()"``.

    Raises
    ------
    IdentityError
        If it has no spelling of its own.
    """
    return _convert(value, where, ())


def _convert(value: Any, where: str, above: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):  # before int and str, which some enums are too
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"()": "bytes", "hex": bytes(value).hex()}
    if isinstance(value, os.PathLike):
        return os.fspath(value) if isinstance(os.fspath(value), str) else repr(value)
    if id(value) in above or len(above) > _MAX_DEPTH:
        raise _refuse(where, value, "that holds itself or is nested without end has no spelling")
    return _compound(value, where, (*above, id(value)))


def _mapping(value: Mapping[Any, Any], where: str, above: tuple[int, ...]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, item in value.items():
        name = key if type(key) is str else _key(key, where)
        if name in result:
            raise _refuse(where, value, f"has two keys that read {name!r}")
        result[name] = _convert(item, f"{where}.{name}", above)
    return result


def _key(key: object, where: str) -> str:
    plain = jsonable(key, f"a key of {where}")
    return plain if isinstance(plain, str) else json.dumps(plain, sort_keys=True)


def _compound(value: Any, where: str, above: tuple[int, ...]) -> Any:
    if isinstance(value, Mapping):
        return _mapping(value, where, above)
    if isinstance(value, (list, tuple)):
        return [_convert(item, f"{where}[{i}]", above) for i, item in enumerate(value)]
    if isinstance(value, AbstractSet):
        items = [_convert(item, f"{where}{{}}", above) for item in value]
        return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))
    if isinstance(value, type):
        return qualified_name(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return _function(value, where)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind == "torch.dtype":
        return str(value).removeprefix("torch.")
    fields = _fields(value)
    if fields is not None:
        return {"()": type(value).__qualname__, **_mapping(fields, where, above)}
    text = repr(value)
    if _ADDRESS.search(text):
        raise _refuse(where, value, "reads as its address only")
    return {"()": type(value).__qualname__, "repr": text}


def _function(value: Callable[..., Any], where: str) -> str:
    name = qualified_name(value)
    owner = getattr(value, "__self__", None)
    if "<" in name or not (owner is None or isinstance(owner, type)):
        raise _refuse(where, value, "without a name of its own")
    return name


def _fields(value: Any) -> Mapping[Any, Any] | None:
    """What an object consists of; ``None`` if it does not say."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict):
        found = to_dict()
        if isinstance(found, Mapping):
            return found
    for declared in ("model_fields", "__struct_fields__"):  # pydantic, msgspec
        names = getattr(type(value), declared, None)
        if isinstance(names, (Mapping, tuple)):
            return {name: getattr(value, name, None) for name in names}
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) and attributes else None
