"""``lifeboat-cache init`` and ``lifeboat-cache config``."""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from lifeboat_cache.cli.output import RefusedError, table
from lifeboat_cache.config import FALLBACK_NAME, load_config
from lifeboat_cache.config.describe import yaml_scalar
from lifeboat_cache.config.paths import CONFIG_FILE_NAME, ENV_CONFIG, Places
from lifeboat_cache.config.schema import Config, Section
from lifeboat_cache.config.template import render_template
from lifeboat_cache.errors import ConfigError, TargetError

__all__ = ["init", "show", "validate"]


def init(args: argparse.Namespace) -> int:
    """Write a commented configuration file."""
    text = render_template(args.preset)
    try:
        places = Places.current()
        named = args.path or args.config
        path = places.expand(str(named)) if named else places.home / CONFIG_FILE_NAME
    except ValueError as error:
        raise ConfigError(f"{error}. Name the file with --path.") from None
    path = Path(os.path.abspath(path))
    _write(path, text, force=args.force)
    print(f"Wrote {path}")
    options = ""
    if path != _in_use(places):
        options = f" --config {path}"
        print(f"Tell engines and commands about it: export {ENV_CONFIG}={path}")
    print(
        "Next:\n"
        "  1. Edit it: the paths and sizes of this machine.\n"
        f"  2. Check it: lifeboat-cache{options} config validate\n"
        f"  3. Check this machine: lifeboat-cache{options} doctor\n"
        "  4. Start the engine with LIFEBOAT_CACHE=1 in its environment."
    )
    return 0


def _in_use(places: Places) -> Path:
    """Return the file that is used when none is named on the command line."""
    named = places.environ.get(ENV_CONFIG)
    return Path(os.path.abspath(named)) if named else places.home / CONFIG_FILE_NAME


def _write(path: Path, text: str, *, force: bool) -> None:
    if path.is_dir():
        raise TargetError(f"{path} is a directory. Name a file, such as {path / CONFIG_FILE_NAME}.")
    if os.path.lexists(path) and not force:
        raise RefusedError(f"{path} is there already. Add --force to replace it.")
    # What is there stays whole until the new file is.
    target = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp") if force else path
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        # Only what is made here gets this mode: a directory that exists is its owner's affair.
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(target, flags, 0o600)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
            if force:
                os.replace(target, path)
        except BaseException:
            target.unlink(missing_ok=True)
            raise
    except FileExistsError:
        raise RefusedError(f"{path} is there already. Add --force to replace it.") from None
    except OSError as error:
        raise TargetError(
            f"{path} cannot be written ({error.strerror}). Name another file with --path."
        ) from None


def show(args: argparse.Namespace) -> int:
    """Print the effective values and where each comes from."""
    loaded = load_config(args.config)
    if args.json:
        document = {
            "source": loaded.source,
            "home": str(loaded.home),
            "files": [str(path) for path in loaded.files],
            "config": loaded.config.model_dump(mode="json"),
            "origins": dict(loaded.origins),
        }
        print(json.dumps(document, indent=2))
        return 0
    print(f"source: {loaded.source}\nhome:   {loaded.home}\n")
    rows = [
        (key, value, loaded.origins.get(key, "default")) for key, value in _values(loaded.config)
    ]
    print(table(("KEY", "VALUE", "FROM"), rows))
    return 0


def _values(section: Section, above: str = "") -> Iterator[tuple[str, str]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        key = f"{above}{name}"
        if isinstance(value, Section):
            yield from _values(value, f"{key}.")
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                yield from _values(item, f"{key}[{index}].")
            if not value:
                yield key, "[]"
        else:
            yield key, "(none)" if value is None else yaml_scalar(value)


def validate(args: argparse.Namespace) -> int:
    """Check the configuration, and say which file it is."""
    if args.file:
        loaded = load_config(args.file, named_by="the command line")
    else:
        loaded = load_config(args.config)
    print(f"{loaded.source}: valid")
    _say_places(loaded.config)
    return 0


def _say_places(config: Config) -> None:
    """Where new KV goes when all is well; the doctor looks at what is."""
    storage = config.storage
    names = [f"{place.name} ({place.location})" for place in storage.places]
    tiers = any(place.name != FALLBACK_NAME for place in storage.places)
    if not tiers or storage.write_mode == "first":
        print(f"KV goes to the first usable of: {', '.join(names)}")
        return
    where = "all" if storage.write_mode == "all" else "the fastest, and from there to slower ones,"
    last = f"; to {names.pop()} if none is usable" if storage.fallback_local.enabled else ""
    print(f"KV goes to {where} of: {', '.join(names)}{last}")
