"""``lifeboat-cache status``."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lifeboat_cache.agent import AgentState, agent_status
from lifeboat_cache.cli.output import RefusedError, clean, table
from lifeboat_cache.config import Config, load_config
from lifeboat_cache.config.paths import ENV_HOME, Places
from lifeboat_cache.config.units import format_duration, format_size
from lifeboat_cache.errors import ConfigError
from lifeboat_cache.registry.measured import known_targets
from lifeboat_cache.registry.overview import AgentFacts, overview
from lifeboat_cache.registry.totals import snapshot

__all__ = ["status"]

_WIDTH = 80

#: What folds counts is done within milliseconds, or was stopped.
_FOLD_S = 5.0

#: Home, then clear to the end of the screen.
_CLEAR = "\x1b[H\x1b[J"


def status(args: argparse.Namespace) -> int:
    """Show what processes do."""
    if args.watch is not None and not 0.1 <= args.watch <= 3600:
        raise RefusedError("--watch: take between 0.1 and 3600 seconds.")
    while True:
        home, config, problem = _configured(args.config)
        try:
            document = _document(home, config, problem)
        except OSError as error:
            raise RefusedError(
                f"{home} cannot be read ({error.strerror}): run this as the engines' user, "
                f"or set {ENV_HOME} to their home directory"
            ) from error
        if args.watch is None:
            print(json.dumps(document, indent=2) if args.json else _text(document))
            return int(not document["healthy"])
        if args.json:
            print(json.dumps(document), flush=True)
        else:
            clear = _CLEAR if sys.stdout.isatty() else ""
            print(f"{clear}{_text(document)}", flush=True)
        time.sleep(args.watch)


def _configured(named: Path | None) -> tuple[Path, Config | None, str]:
    """The home directory, the configuration, and why that cannot be used.

    A file that was broken while engines run hides nothing of what they do.
    """
    try:
        loaded = load_config(named)
    except ConfigError as error:
        try:
            return Places.current().home, None, str(error)
        except (ValueError, OSError):
            raise error from None
    return loaded.home, loaded.config, ""


def _document(home: Path, config: Config | None, problem: str) -> dict[str, Any]:
    found = snapshot(home, wait_s=_FOLD_S)
    if found is None:
        raise RefusedError(
            f"{home / 'run' / 'totals.lock'} is held by a process that does not go on: "
            "end that process"
        )
    return overview(home, found, known_targets(found, config), _agent(home, config), problem)


def _agent(home: Path, config: Config | None) -> AgentFacts:
    found = agent_status(home)
    reason = "" if found.state is AgentState.RUNNING else found.reason
    # Being started: it will be there in a moment.
    starting = found.state is AgentState.STARTING
    autostart = config is None or config.agent.autostart
    return AgentFacts(expected=autostart and not starting, reason=reason)


def _text(document: Mapping[str, Any]) -> str:
    parts = [_verdict(document), _processes(document), _stores(document), _ladders(document)]
    parts += [
        _spaces(document),
        _kept(document),
        _codecs(document),
        _choices(document),
        _changes(document),
    ]
    parts += [_recovering(document), _sums(document["totals"])]
    return "\n\n".join(part for part in parts if part)


def _verdict(document: Mapping[str, Any]) -> str:
    word = "healthy" if document["healthy"] else "unhealthy"
    lines = [f"LifeboatCache {document['core']}: {word}"]
    for problem in document["problems"]:
        lines += textwrap.wrap(
            clean(problem),
            _WIDTH,
            initial_indent="  ! ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
    where = clean(document["home"])
    lines.append(
        f"Home directory: {where}"
        if document["processes"]
        else f"No engine is running. Home directory: {where}"
    )
    agent = document["agent"]
    if agent and agent["dashboard"].get("url"):
        lines.append(f"Dashboard: {clean(agent['dashboard']['url'])}")
    elif agent and agent["dashboard"].get("problem"):
        lines += _wrapped(agent["dashboard"]["problem"])
    return "\n".join(lines)


def _processes(document: Mapping[str, Any]) -> str:
    agent = document["agent"]
    everyone = [*document["processes"], *([agent] if agent else [])]
    if not everyone:
        return ""
    hosts = {item["host"] for item in everyone}
    rows = []
    for item in everyone:
        engine = item.get("engine", {})
        what = " ".join(str(engine[key]) for key in ("name", "version") if engine.get(key))
        row = [
            item["pid"] or "?",
            item["role"] or "?",
            item["core"] or "?",
            "-" if item["up_s"] is None else format_duration(item["up_s"]),
            "never" if item["heartbeat_s"] is None else _ago(item["heartbeat_s"]),
            _cut(item["state"], 12),
            _cut(what or "-", 16),
        ]
        rows.append([*row, _cut(item["host"], 16)] if len(hosts) > 1 else row)
    head = ["pid", "role", "core", "up", "heard", "state", "engine"]
    return table([*head, "host"] if len(hosts) > 1 else head, rows)


def _stores(document: Mapping[str, Any]) -> str:
    rows = []
    for item in document["processes"]:
        counts = item["counts"]
        rows.append(
            [
                item["pid"] or "?",
                _cut(item["namespace"].get("name") or "-", 12),
                _cut(item["target"].get("name") or "-", 14),
                _number(item["index"].get("blocks")),
                _percent(counts["hit_rate"]),
                _size(counts["loaded_bytes"]),
                _size(counts["stored_bytes"]),
                _size(item["queue"].get("pending_bytes")),
            ]
        )
    head = ("pid", "namespace", "target", "blocks", "hits", "loaded", "stored", "queued")
    return table(head, rows) if rows else ""


def _ladders(document: Mapping[str, Any]) -> str:
    """The targets of each store, where there are several."""
    rows = []
    for item in document["processes"]:
        targets = item["targets"]
        for target in targets if len(targets) > 1 else ():
            queue = target.get("queue")
            queued = queue.get("pending_bytes") if isinstance(queue, Mapping) else None
            rows.append(
                [
                    item["pid"] or "?",
                    _cut(target.get("name") or "-", 14),
                    _cut(target.get("rung") or "-", 8),
                    # A fallback that has not been needed is not opened.
                    _cut("unused" if target.get("state") == "closed" else target["state"], 10)
                    if target.get("state")
                    else "-",
                    "yes" if target.get("writing") else "no",
                    _number(target.get("blocks")),
                    _size(target.get("loaded_bytes")),
                    _size(target.get("stored_bytes")),
                    _size(queued),
                    _number(target.get("copied_blocks")),
                ]
            )
    head = ("pid", "target", "rung", "state", "writes", "blocks", "loaded", "stored")
    return table((*head, "queued", "copied"), rows) if rows else ""


def _spaces(document: Mapping[str, Any]) -> str:
    rows = [
        [
            _cut(target.get("name") or "-", 14),
            _size(target.get("used_bytes")),
            "no limit" if target.get("capacity_bytes") is None else _size(target["capacity_bytes"]),
            _size(target.get("free_bytes")),
            _size(target.get("reserve_bytes")),
            _size(target.get("evicted_bytes")),
            _size(target.get("reclaimed_bytes")),
        ]
        for target in document["targets"]
    ]
    head = ("target", "used", "capacity", "free", "reserve", "evicted", "reclaimed")
    return table(head, rows) if rows else ""


def _kept(document: Mapping[str, Any]) -> str:
    """What lies on each target, by codec."""
    rows = []
    for target in document["targets"]:
        codecs = target.get("codecs")
        for codec, sums in codecs.items() if isinstance(codecs, Mapping) else ():
            if not isinstance(sums, Mapping):
                continue
            raw, kept = sums.get("raw_bytes"), sums.get("bytes")
            ratio = "-"
            if isinstance(raw, (int, float)) and isinstance(kept, (int, float)) and kept > 0:
                ratio = f"{raw / kept:.2f}"
            rows.append(
                [
                    _cut(target.get("name") or "-", 14),
                    _cut(codec, 12),
                    _number(sums.get("blocks")),
                    _size(raw),
                    _size(kept),
                    ratio,
                ]
            )
    head = ("target", "codec", "blocks", "KV", "kept as", "ratio")
    return table(head, rows) if rows else ""


def _codecs(document: Mapping[str, Any]) -> str:
    """What has gone through which codec, and how exact it was."""
    errors: dict[str, float] = {}
    for item in document["processes"]:
        for one in _items(item["codecs"].get("guard")):
            error = one.get("error")
            if isinstance(error, (int, float)) and one.get("samples"):
                codec = str(one.get("codec"))
                errors[codec] = max(error, errors.get(codec, 0.0))
    rows = [
        [
            codec,
            _size(sums["encoded_raw_bytes"]),
            _size(sums["encoded_bytes"]),
            f"{sums['ratio']:.2f}",
            _size(sums["decoded_raw_bytes"]),
            _size(sums["decoded_bytes"]),
            f"{100 * errors[codec]:.2g} %" if codec in errors else "-",
        ]
        for codec, sums in document["totals"]["codecs"].items()
    ]
    head = ("codec", "KV stored", "as", "ratio", "KV loaded", "from", "error")
    return table(head, rows) if rows else ""


def _choices(document: Mapping[str, Any]) -> str:
    """Which codecs stores use, and why."""
    lines: dict[str, None] = {}
    for item in document["processes"]:
        for choice in _items(item["codecs"].get("choices")):
            text = f"pid {item['pid']} stores KV as {choice.get('codec')}: {choice.get('reason')}"
            lines.update(dict.fromkeys([text]))
    return "\n".join(line for text in lines for line in _wrapped(text))


def _changes(document: Mapping[str, Any]) -> str:
    """Changes of the configuration that are not in effect."""
    lines: list[str] = []
    for item in document["processes"]:
        keys = item["config"].get("restart")
        if isinstance(keys, list) and keys:
            shown = ", ".join(str(key) for key in keys)
            lines += _wrapped(f"pid {item['pid']}: restart required to apply {shown}")
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(clean(text), _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _recovering(document: Mapping[str, Any]) -> str:
    lines = []
    for item in document["processes"]:
        recovery = item["recovery"]
        if item["state"] == "opening":
            lines.append(f"pid {item['pid']} is finding out which model it serves")
        elif recovery and not recovery.get("done"):
            found = _number(recovery.get("blocks"))
            lines.append(f"pid {item['pid']} is reading the index: {found} blocks so far")
    return "\n".join(lines)


def _sums(totals: Mapping[str, Any]) -> str:
    asked = f"{_number(totals['lookups'])} lookups, {_percent(totals['hit_rate'])} hits"
    moved = f"{_size(totals['loaded_bytes'])} loaded, {_size(totals['stored_bytes'])} stored"
    lines = [f"In all: {asked}; {moved}"]
    if totals["served_tokens"]:
        lines.append(
            f"Tokens that were not computed: {_number(totals['served_tokens'])}{_saved(totals)}"
        )
    lines += _latencies(totals["latency"])
    for name, text in (("store_dropped", "Not stored"), ("load_failed", "Not loaded")):
        reasons = totals[name]
        if reasons:
            shown = ", ".join(f"{reason} {_number(n)}" for reason, n in reasons.items())
            lines += textwrap.wrap(f"{text} (blocks): {shown}", _WIDTH, subsequent_indent="  ")
    return "\n".join(lines)


def _saved(totals: Mapping[str, Any]) -> str:
    """What part of all prompts that is, and how long they would have been computed."""
    parts = []
    if totals["prompt_tokens"]:
        asked = _number(totals["prompt_tokens"])
        parts.append(f"{_percent(totals['token_hit_rate'])} of {asked} asked")
    if totals["saved_seconds"]:
        parts.append(f"about {format_duration(totals['saved_seconds'])} of prefill")
    return f" ({', '.join(parts)})" if parts else ""


def _latencies(found: Mapping[str, Any]) -> list[str]:
    shown = [
        f"{name} {_seconds(found[kind]['p50_s'])} and {_seconds(found[kind]['p99_s'])}"
        for kind, name in (("load", "loads"), ("store", "stores"), ("lookup", "lookups"))
        if kind in found
    ]
    return [f"Median and 99th percentile: {', '.join(shown)}"] if shown else []


def _seconds(value: float) -> str:
    if value < 0.001:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1000:.1f} ms" if value < 0.1 else format_duration(value)


def _cut(text: object, width: int) -> str:
    shown = clean(text)
    return shown if len(shown) <= width else shown[: width - 1] + "~"


def _ago(seconds: float) -> str:
    return "now" if seconds < 3 else f"{format_duration(seconds)} ago"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.0f} %"


def _size(size: Any) -> str:
    return format_size(int(size)) if isinstance(size, (int, float)) else "-"


def _number(number: Any) -> str:
    if not isinstance(number, (int, float)):
        return "-"
    value = float(number)
    for unit in ("", "k", "M", "G"):
        if value < 999.5 or unit == "G":
            return f"{value:.0f}{unit}" if not unit or value >= 99.95 else f"{value:.1f}{unit}"
        value /= 1000
    raise AssertionError("unreachable")
