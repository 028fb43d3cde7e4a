"""Makes ``docs/configuration.md``: ``python -m lifeboat_cache.config.reference``."""

from __future__ import annotations

import inspect

from lifeboat_cache.config.describe import Entry, entries
from lifeboat_cache.config.loader import preset_names, preset_path

__all__ = ["render_reference"]

_INTRO = """\
# Configuration

<!-- Made by: python -m lifeboat_cache.config.reference > docs/configuration.md
     Change the descriptions in lifeboat_cache/config/sections, not here. -->

LifeboatCache works without a configuration file. To start one, with every key explained in it:

```
lifeboat-cache init
```

`lifeboat-cache config show` prints the values in effect and where each comes from,
`lifeboat-cache config validate` checks a file, and `lifeboat-cache doctor` checks whether
this machine can do what it says.

## Which file is used

The first of these:

1. the file given by `--config`;
2. the file named by the environment variable `LIFEBOAT_CACHE_CONFIG`;
3. `lifeboat.yaml` in the home directory, if it exists;
4. none: the defaults below.

A file that is named but does not exist is an error. The home directory is
`$LIFEBOAT_CACHE_HOME`, by default `~/.lifeboat_cache`. Engines find the file the same way, in
their own environment: check it with the same user and variables.

## How values are written

- Sizes: a plain number counts in the unit that the key's name ends in (`capacity_gb: 200` is
  200e9 bytes). With a unit it is taken as written: `200G`, `1.5T`, `500 MB` (powers of
  1,000), `1Gi`, `512MiB` (powers of 1,024).
- Durations: a plain number counts in seconds; `250ms`, `5s`, `2m`, `1h` and `7d` work too.
- Paths are absolute. `~`, `$NAME` and `${NAME}` are expanded; a variable that is not set is an
  error. `$LIFEBOAT_CACHE_HOME` always stands for the home directory.
- A key without a value (`tiers:`) counts as absent.
- Unknown keys, duplicate keys and values out of range are refused, with file, line, key and
  what to write instead.

## Building on another file

`extends: NAME` at the top of a file takes a preset as the base; `extends: other.yaml` takes a
file, relative to the one that extends it. The base can extend another one. Mappings are merged
key by key; lists and single values replace those of the base.

## Environment variables

| variable | meaning |
|---|---|
| `LIFEBOAT_CACHE` | `1` switches the cache on in vLLM and SGLang; without it, or with `0`, it is \
off |
| `LIFEBOAT_CACHE_CONFIG` | the configuration file |
| `LIFEBOAT_CACHE_HOME` | the home directory, by default `~/.lifeboat_cache` |
| `LIFEBOAT_CACHE_INTEGRITY_KEY` | the integrity key, 64 hexadecimal digits or more; overrides \
`security.integrity_key` |
| `LIFEBOAT_CACHE_NAMESPACE_SALT` | overrides `security.namespace_salt`; empty counts as not set |

## Keys
"""


def render_reference() -> str:
    """Return the reference page of the configuration as Markdown."""
    parts = [_INTRO]
    for path, section, own in entries():
        parts.append(f"\n### `{'.'.join(path)}`\n\n{inspect.cleandoc(section.__doc__ or '')}\n")
        parts.append(
            "\n| key | default | unit | allowed | restart required |\n|---|---|---|---|---|\n"
        )
        parts.extend(_row(entry) for entry in own)
        parts.append("\n")
        parts.extend(f"- `{entry.path[-1]}`: {entry.field.description}\n" for entry in own)
    parts.append("\n## Presets\n")
    for name in preset_names():
        text = preset_path(name).read_text(encoding="utf-8")
        parts.append(f"\n### `{name}`\n\n```yaml\n{text}```\n")
    return "".join(parts)


def _row(entry: Entry) -> str:
    if entry.required:
        default = "(required)"
    elif entry.default:
        default = f"`{entry.default}`"
    else:
        default = "(none)"
    cells = (
        f"`{entry.path[-1]}`",
        default,
        entry.key.unit or "-",
        entry.key.allowed,
        "yes" if entry.key.restart else "no",
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


if __name__ == "__main__":
    print(render_reference(), end="")
