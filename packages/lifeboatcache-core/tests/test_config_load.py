from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

import lifeboat_cache.config
from lifeboat_cache.config import (
    Config,
    LoadedConfig,
    load_config,
    preset_names,
    preset_path,
)
from lifeboat_cache.config.reference import render_reference
from lifeboat_cache.config.template import render_template
from lifeboat_cache.errors import ConfigError

HOME = "/home/somebody"
ENVIRON = {"HOME": HOME}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load(tmp_path: Path, text: str, **environ: str) -> LoadedConfig:
    return load_config(write(tmp_path / "lifeboat.yaml", text), {**ENVIRON, **environ})


def problem(tmp_path: Path, text: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, **environ)
    return str(caught.value).replace(f"{tmp_path}/", "")


# --- which file ------------------------------------------------------------------------------


def test_defaults_without_any_file() -> None:
    loaded = load_config(environ=ENVIRON)
    config = loaded.config
    assert loaded.files == ()
    assert loaded.home == Path(HOME, ".lifeboat_cache")
    assert "built-in defaults" in loaded.source
    assert loaded.origins == {}
    assert config.storage.tiers == ()
    fallback = config.storage.fallback_local
    assert fallback.enabled
    assert fallback.path == Path(HOME, ".lifeboat_cache/kv")
    assert (fallback.capacity_bytes, fallback.min_free_bytes) == (50 * 10**9, 10 * 10**9)
    assert config.engine.native_cpu_bytes == 20 * 10**9
    assert config.engine.native_block_tokens == 256
    assert config.engine.native_promotion_wait_s == 5.0
    assert config.engine.io_workers == 8
    assert config.security.salt_bytes == b""
    (place,) = config.storage.places
    assert (place.name, place.path, place.capacity_bytes) == (
        "fallback_local",
        fallback.path,
        50 * 10**9,
    )


def test_the_file_is_argument_then_variable_then_home(tmp_path: Path) -> None:
    argument = write(tmp_path / "argument.yaml", "engine: {io_workers: 1}")
    variable = write(tmp_path / "variable.yaml", "engine: {io_workers: 2}")
    home = write(tmp_path / "home/lifeboat.yaml", "engine: {io_workers: 3}")
    environ = {
        **ENVIRON,
        "LIFEBOAT_CACHE_CONFIG": str(variable),
        "LIFEBOAT_CACHE_HOME": str(home.parent),
    }
    seen = []
    for path in (argument, None):
        loaded = load_config(path, environ)
        seen.append((loaded.config.engine.io_workers, loaded.files, loaded.source))
    del environ["LIFEBOAT_CACHE_CONFIG"]
    loaded = load_config(None, environ)
    seen.append((loaded.config.engine.io_workers, loaded.files, loaded.source))
    home.unlink()
    seen.append((load_config(None, environ).config.engine.io_workers, (), ""))
    assert seen == [
        (1, (argument,), f"{argument} (--config)"),
        (2, (variable,), f"{variable} ($LIFEBOAT_CACHE_CONFIG)"),
        (3, (home,), f"{home} (home directory)"),
        (8, (), ""),
    ]


def test_a_named_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere/x.yaml"
    with pytest.raises(ConfigError, match=r"no such file, but --config names it.*init --path"):
        load_config(missing, ENVIRON)
    with pytest.raises(ConfigError, match=r"\$LIFEBOAT_CACHE_CONFIG names it"):
        load_config(None, {**ENVIRON, "LIFEBOAT_CACHE_CONFIG": str(missing)})


def test_an_empty_variable_counts_as_not_set() -> None:
    environ = {**ENVIRON, "LIFEBOAT_CACHE_CONFIG": "", "LIFEBOAT_CACHE_HOME": ""}
    environ["LIFEBOAT_CACHE_NAMESPACE_SALT"] = ""
    assert load_config(None, environ).home == Path(HOME, ".lifeboat_cache")


def test_a_dangling_link_in_the_home_is_an_error_not_an_absent_file(tmp_path: Path) -> None:
    (tmp_path / "lifeboat.yaml").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="no such file"):
        load_config(None, {**ENVIRON, "LIFEBOAT_CACHE_HOME": str(tmp_path)})


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        load_config(tmp_path, ENVIRON)


def test_the_process_environment_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIFEBOAT_CACHE_CONFIG", raising=False)
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(tmp_path))
    assert load_config().config.storage.fallback_local.path == tmp_path / "kv"
    # Also for a schema that is used without the loader.
    assert Config.model_validate({}).storage.fallback_local.path == tmp_path / "kv"


def test_a_relative_home_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(None, {**ENVIRON, "LIFEBOAT_CACHE_HOME": "h"}).home == tmp_path / "h"


def test_a_home_that_refers_to_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="LIFEBOAT_CACHE_HOME: the environment variable 'X'"):
        load_config(None, {"LIFEBOAT_CACHE_HOME": "$X/y"})
    # It cannot refer to itself.
    with pytest.raises(ConfigError, match="'LIFEBOAT_CACHE_HOME' in"):
        load_config(None, {"LIFEBOAT_CACHE_HOME": "$LIFEBOAT_CACHE_HOME/y"})


def test_a_user_without_a_home_directory_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not a directory called "~" wherever the server was started.
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ConfigError, match=r"no home directory .* Set it to an absolute path"):
        load_config(None, {})


@pytest.mark.parametrize(
    "environ", [{"LIFEBOAT_CACHE_HOME": "h"}, {"HOME": "/", "LIFEBOAT_CACHE_CONFIG": "a.yaml"}]
)
def test_a_relative_path_from_a_directory_that_is_gone_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environ: dict[str, str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="No such file or directory"):
        load_config(None, environ)


# --- values ----------------------------------------------------------------------------------


def test_a_full_file(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        """
        storage:
          tiers:
            - {name: fast, type: filesystem, path: ~/fast, capacity_gb: 200, direct_io: on}
            - {name: big, type: filesystem, path: "$DISK/kv", capacity_gb: 1.5T,
               min_free_gb: 1Gi, direct_io: off, enabled: false}
            - {name: open, type: filesystem, path: "${LIFEBOAT_CACHE_HOME}/open"}
          fallback_local: {capacity_gb: "500 MB", min_free_gb: 0}
        engine:
          native_cpu_gb: 4Gi
          native_promotion_wait_s: 250ms
        security: {namespace_salt: "of the day"}
        """,
        DISK="/mnt/disk",
    )
    fast, big, free = loaded.config.storage.tiers
    assert (fast.path, fast.capacity_bytes, fast.direct_io) == (
        Path(HOME, "fast"),
        200 * 10**9,
        "on",
    )
    assert (big.path, big.capacity_bytes, big.min_free_bytes, big.direct_io) == (
        Path("/mnt/disk/kv"),
        1_500_000_000_000,
        2**30,
        "off",
    )
    assert (free.path, free.capacity_bytes, free.min_free_bytes, free.direct_io) == (
        Path(HOME, ".lifeboat_cache/open"),
        None,
        10 * 10**9,
        "auto",
    )
    assert [place.name for place in loaded.config.storage.places] == [
        "fast",
        "open",
        "fallback_local",
    ]
    assert loaded.config.storage.fallback_local.capacity_bytes == 500_000_000
    assert loaded.config.engine.native_cpu_bytes == 4 * 2**30
    assert loaded.config.engine.native_promotion_wait_s == 0.25
    assert loaded.config.security.salt_bytes == b"of the day"
    assert loaded.origins["storage.tiers[1].min_free_gb"] == f"{tmp_path}/lifeboat.yaml:6"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "null\n", "{}\n"])
def test_an_empty_file_means_the_defaults(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text).config == load_config(environ=ENVIRON).config


def test_keys_without_a_value_count_as_absent(tmp_path: Path) -> None:
    text = "storage:\n  tiers:\n  fallback_local:\n    path:\nengine:\n  io_workers:\nsecurity:\n"
    assert load(tmp_path, text).config == load_config(environ=ENVIRON).config
    # But not if the key does not exist.
    assert "engine.nothing: unknown key" in problem(tmp_path, "engine: {nothing: }")


def test_values_cannot_be_changed() -> None:
    engine = load_config(environ=ENVIRON).config.engine
    with pytest.raises(ValueError, match="frozen"):
        engine.io_workers = 3


def test_tilde_and_variables_only_where_they_are_written(tmp_path: Path) -> None:
    text = "storage: {fallback_local: {path: $A}}"
    assert load(tmp_path, text, A="/x/$B/~").config.storage.fallback_local.path == Path("/x/$B/~")
    assert "no user 'nobody-of-that-name'" in problem(
        tmp_path, "storage: {fallback_local: {path: ~nobody-of-that-name/x}}"
    )


def test_yaml_aliases_and_merge_keys(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        """
        storage:
          fallback_local: &place {path: /a, capacity_gb: 3, min_free_gb: 1}
          tiers:
            - &one {<<: *place, name: one, type: filesystem, path: /b}
            - {<<: *one, name: two, path: /c}
        """,
    )
    one, two = loaded.config.storage.tiers
    assert (one.capacity_gb, one.path) == (3.0, Path("/b"))
    assert (two.capacity_gb, two.path, two.name) == (3.0, Path("/c"), "two")


# --- the salt --------------------------------------------------------------------------------


def test_the_salt_of_the_environment_wins(tmp_path: Path) -> None:
    loaded = load(
        tmp_path, "security: {namespace_salt: file}", LIFEBOAT_CACHE_NAMESPACE_SALT="environment"
    )
    assert loaded.config.security.salt_bytes == b"environment"
    assert loaded.origins["security.namespace_salt"] == "$LIFEBOAT_CACHE_NAMESPACE_SALT"
    alone = load_config(None, {**ENVIRON, "LIFEBOAT_CACHE_NAMESPACE_SALT": "x"})
    assert alone.config.security.salt_bytes == b"x"


def test_the_salt_never_shows(tmp_path: Path) -> None:
    loaded = load(tmp_path, "security: {namespace_salt: s3cret}")
    assert "s3cret" not in repr(loaded) + str(loaded.config) + loaded.config.model_dump_json()


@pytest.mark.parametrize(
    "text",
    [
        "security: {namespace_salt: 733361}",
        "security: {namespace_salt: [733361]}",
        'security: {namespace_salt: "733361',
        "security: {namespace_salt: 733361: x}",
        "security: 733361",
        "security: {namespace_salt: ok, namespace_salt: 733361}",
    ],
)
def test_errors_do_not_show_the_salt(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert "lifeboat.yaml:" in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    assert "733361" not in str(caught.value)


# --- errors ----------------------------------------------------------------------------------

TIER = "storage: {{tiers: [{{name: a, type: filesystem, path: /a, {0}}}]}}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("storge: {}", "lifeboat.yaml:1: storge: unknown key. Did you mean 'storage'?"),
        ("extend: x", "extend: unknown key. Did you mean 'extends'?"),
        (
            "\nstorage:\n  fallback_locl: {}",
            "lifeboat.yaml:3: storage.fallback_locl: unknown key. Did you mean 'fallback_local'?",
        ),
        (
            TIER.format("capacity: 3"),
            "storage.tiers[0].capacity: unknown key. Did you mean 'capacity_gb'?",
        ),
        ("io_workers: 3", "io_workers: unknown key. It belongs in engine: move it there."),
        (
            "capacity_gb: 3",
            "It belongs in storage.tiers[] or storage.fallback_local: move it there.",
        ),
        ("engine: {zz: 1}", "Remove it; known here are: native_cpu_gb, native_block_tokens,"),
        (
            "engine: {io_workers: 0}",
            (
                "engine.io_workers: 0 is not allowed. Allowed: a whole number from 1 to 64. "
                "Write for example io_workers: 8."
            ),
        ),
        ("eviction: {max_age: 30}", "eviction.max_age: 30 has no unit. Allowed: 0, or up to"),
        ("eviction: {max_age: '30.'}", "eviction.max_age: '30.' has no unit. Allowed: 0, or up to"),
        ("eviction: {max_age: 1d12}", "eviction.max_age: '1d12' is not a duration. Allowed: 0, or"),
        ("eviction: {max_age: 20y}", "'20y' is not a duration: there is no unit 'y'."),
        (
            TIER.format("file_mode: 0644"),
            "file_mode: '0644' is not allowed. Allowed: 0600,",
        ),
        (TIER.format("group: 'a b'"), "'a b' is not allowed. Allowed: the name or number of a"),
        ("engine: {io_workers: '8'}", "engine.io_workers: '8' is not allowed."),
        ("engine: {io_workers: true}", "engine.io_workers: True is not allowed."),
        ("engine: {native_block_tokens: 2.5}", "2.5 is not allowed. Allowed: a whole number"),
        ("engine: {native_promotion_wait_s: 601.5}", "601.5 is not allowed. Allowed: 0 to 600"),
        ("engine: {native_promotion_wait_s: 5x}", "'5x' is not a duration: there is no unit 'x'."),
        ("engine: {native_promotion_wait_s: .inf}", "inf is not allowed"),
        ("engine: {native_promotion_wait_s: [5]}", "[5] is not a duration"),
        ("engine: {native_cpu_gb: .nan}", "nan is not allowed"),
        ("engine: {native_cpu_gb: 0}", "0 is not allowed. Allowed: above 0"),
        ("engine: {native_cpu_gb: 20000000000}", "more than 1,000,000 GB; a plain number is in GB"),
        (TIER.format("capacity_gb: 20O"), "'20O' is not a size: there is no unit 'O'."),
        (TIER.format("capacity_gb: true"), "True is not a size"),
        (TIER.format("min_free_gb: -1.5"), "-1.5 is not allowed. Allowed: 0 or more"),
        (TIER.format("min_free_gb: -1G"), "'-1G' is not a size"),
        (TIER.format("direct_io: maybe"), "'maybe' is not allowed. Allowed: auto, on or off."),
        (TIER.format("enabled: 'yes'"), "'yes' is not allowed. Allowed: true or false."),
        ("storage: {fallback_local: {path: kv}}", "'kv' is relative"),
        ("storage: {fallback_local: {path: ''}}", "'' is not a path"),
        ("storage: {fallback_local: {path: 3}}", "3 is not a path"),
        ("storage: {fallback_local: {path: $NO/x}}", "variable 'NO' in '$NO/x' is not set"),
        ("storage: {fallback_local: {path: '${}/x'}}", "variable '' in '${}/x' is not set"),
        ("storage: {fallback_local: 3}", "storage.fallback_local: 3 instead of a mapping."),
        (
            "storage: [1]",
            "storage: [1] instead of a mapping. Write keys below it: tiers, write_mode",
        ),
        ("storage: {tiers: {name: x}}", "storage.tiers: {'name': 'x'} is not allowed."),
        ("storage: {tiers: [x]}", "storage.tiers[0]: 'x' instead of a mapping."),
        (
            "storage: {tiers: [{type: filesystem, path: /a}]}",
            "storage.tiers[0].name: missing. Add it, for example name: nvme.",
        ),
        ("storage: {tiers: [{name: A b, type: filesystem, path: /a}]}", "'A b' is not allowed."),
        ("storage: {tiers: [{name: 'a\\n', type: filesystem, path: /a}]}", "is not allowed."),
        (
            (
                "storage:\n  tiers:\n    - {name: a, type: filesystem, path: /a}\n"
                "    - {name: a, type: filesystem, path: /b}"
            ),
            "lifeboat.yaml:4: storage.tiers[1].name: 'a' is the name of storage.tiers[0] too",
        ),
        (
            (
                "storage: {tiers: [{name: a, type: filesystem, path: /a}, "
                "{name: b, type: filesystem, path: /a/}]}"
            ),
            "storage.tiers[1].path: '/a' is the path of storage.tiers[0] too",
        ),
        (
            "storage: {tiers: [{name: fallback_local, type: filesystem, path: /a}]}",
            "'fallback_local' is the name of storage.fallback_local",
        ),
        ("storage: {fallback_local: {enabled: no}}", "nothing could be stored"),
        (
            "dashboard:\n  port: 9402",
            "lifeboat.yaml:2: dashboard.port: 9402 is telemetry.prometheus.port too",
        ),
        (
            "dashboard: {host: localhost}\ntelemetry: {prometheus: {port: 9400}}",
            "9400 is telemetry.prometheus.port too",
        ),
        (
            "dashboard: {port: 9402}\ntelemetry: {prometheus: {host: 0.0.0.0}}",
            "9402 is telemetry.prometheus.port too",
        ),
        # YAML
        ("- a", "lifeboat.yaml:1: a list instead of a mapping."),
        ("\njust text", "lifeboat.yaml:2: a single value instead of a mapping."),
        ("a: 1\nb: [1\n", "lifeboat.yaml:3: not valid YAML"),
        ("a: 1\n\tb: 2", "lifeboat.yaml:2: not valid YAML"),
        ("a: 1\n---\nb: 2", "lifeboat.yaml:2: not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]", "the tag"),
        ("a: !x 1", "not valid YAML: could not determine a constructor for the tag '!x'"),
        ("a: 2026-99-99", "not valid YAML"),
        ("a: &a [*a]", "an alias of itself"),
        ("on: 1", "the key True is not text. Put it in quotes."),
        (
            "engine:\n  io_workers: 1\n  io_workers: 2",
            (
                "lifeboat.yaml:3: the key "
                "'engine.io_workers' is there twice, first in line 2. Remove one of them."
            ),
        ),
        ("extends: 3", "lifeboat.yaml:1: extends: 3 is not a name."),
        (
            "extends: single_node",
            "storage_efficient. Or name a file, ending in .yaml.",
        ),
        (
            "extends: single_node",
            "there is no preset 'single_node'. Did you mean 'single_node_gpu'?",
        ),
        ("extends: other.yaml", "lifeboat.yaml:1: extends: there is no file"),
        ("extends: $NO/other.yaml", "extends: the environment variable 'NO'"),
    ],
)
def test_errors_name_file_key_value_and_remedy(tmp_path: Path, text: str, expected: str) -> None:
    message = problem(tmp_path, text)
    assert expected in message
    assert message.startswith("lifeboat.yaml:")
    assert message.endswith((".", "?", "off)."))
    assert "\n" not in message


def test_a_bucket_needs_a_name_and_no_path(tmp_path: Path) -> None:
    where = "{name: a, type: s3, bucket: kv-cache, endpoint_url: 'http://s3:9000', prefix: x/y}"
    (tier,) = load(tmp_path, f"storage: {{tiers: [{where}]}}").config.storage.tiers
    assert tier.path.parts[-2:] == ("s3", "a")
    assert tier.location == "s3://kv-cache/x/y at http://s3:9000"
    assert tier.staging_bytes == 20_000_000_000
    message = problem(tmp_path, "storage: {tiers: [{name: a, type: s3}]}")
    assert "tiers[0].bucket: a tier of type s3 needs one: write the bucket's name" in message
    key = "{name: a, type: s3, bucket: kv-cache, sse: AES256, sse_kms_key_id: k}"
    assert "set that too" in problem(tmp_path, f"storage: {{tiers: [{key}]}}")


def test_the_types_of_this_version_are_named_and_nothing_else_of_that_tier(tmp_path: Path) -> None:
    message = problem(tmp_path, "storage: {tiers: [{name: a, type: gcs, bucket: b, zone: r}]}")
    assert message == (
        "lifeboat.yaml:1: storage.tiers[0].type: 'gcs' is not allowed. "
        "Allowed: filesystem, nfs, ontap or s3. Write for example type: filesystem."
    )


@pytest.mark.parametrize("written", ["0660", '"0660"', "660", "'660'"])
def test_modes_and_groups_as_people_write_them(tmp_path: Path, written: str) -> None:
    text = TIER.format(f"file_mode: {written}, group: 1000")
    if written == "'660'":
        assert "'660' is not allowed" in problem(tmp_path, text)
        return
    (tier,) = load(tmp_path, text).config.storage.tiers
    assert tier.file_mode_bits == 0o660
    assert tier.group == "1000"


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    message = problem(tmp_path, "engine:\n  io_workers: 0\n  foo: 1\nzzz: 1\n")
    assert message.splitlines()[0] == "3 problems in the configuration:"
    assert len(message.splitlines()) == 4


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"a: \xff\xfe", "lifeboat.yaml:1: not UTF-8"),
        (b"a: 1\nb: \x00", "special characters are not allowed"),
        (b"[" * 50_000, "nested too deeply"),
        (
            (
                b"a: &a [1,1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
                b"c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\n"
                b"e: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e,*e,*e]\n"
            ),
            "more than 100,000 values",
        ),
    ],
)
def test_hostile_bytes_are_a_config_error(tmp_path: Path, raw: bytes, expected: str) -> None:
    path = tmp_path / "lifeboat.yaml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=expected):
        load_config(path, ENVIRON)


def test_a_byte_order_mark_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "lifeboat.yaml"
    path.write_bytes(b"\xef\xbb\xbfengine: {io_workers: 2}\r\n")
    assert load_config(path, ENVIRON).config.engine.io_workers == 2


# --- extends ---------------------------------------------------------------------------------


def test_a_preset_as_the_base(tmp_path: Path) -> None:
    loaded = load(tmp_path, "extends: single_node_gpu\nengine: {io_workers: 3}\n")
    (tier,) = loaded.config.storage.tiers
    assert tier.path == Path(HOME, ".lifeboat_cache/nvme")
    assert tier.capacity_bytes == 200 * 10**9
    assert loaded.config.engine.io_workers == 3
    assert loaded.files == (tmp_path / "lifeboat.yaml", preset_path("single_node_gpu"))
    assert loaded.source.endswith("(--config), extends preset single_node_gpu")
    assert loaded.origins["engine.io_workers"] == f"{tmp_path}/lifeboat.yaml:2"
    assert loaded.origins["storage.tiers[0].name"].startswith(str(preset_path("single_node_gpu")))


def test_mappings_merge_and_lists_replace_along_a_chain(tmp_path: Path) -> None:
    write(
        tmp_path / "base.yaml",
        """
        storage:
          tiers:
            - {name: a, type: filesystem, path: /a}
            - {name: b, type: filesystem, path: /b}
          fallback_local: {capacity_gb: 1, min_free_gb: 1}
        engine: {io_workers: 1, native_block_tokens: 16}
        """,
    )
    write(tmp_path / "sub/middle.yaml", "extends: ../base.yaml\nengine: {io_workers: 2}\n")
    loaded = load(
        tmp_path,
        """
        extends: sub/middle.yaml
        storage:
          tiers: [{name: c, type: filesystem, path: /c}]
          fallback_local: {capacity_gb: 3}
        engine: {native_block_tokens: }
        """,
    )
    config = loaded.config
    assert [tier.name for tier in config.storage.tiers] == ["c"]
    assert (
        config.storage.fallback_local.capacity_gb,
        config.storage.fallback_local.min_free_gb,
    ) == (
        3.0,
        1.0,
    )
    assert (config.engine.io_workers, config.engine.native_block_tokens) == (2, 16)
    assert loaded.files == (
        tmp_path / "lifeboat.yaml",
        tmp_path / "sub/middle.yaml",
        tmp_path / "base.yaml",
    )
    assert loaded.source.endswith(f"middle.yaml, which extends {tmp_path}/base.yaml")
    # Nothing is left of the list that was replaced.
    assert [key for key in loaded.origins if "tiers[1]" in key] == []
    assert loaded.origins["storage.tiers[0].name"] == f"{tmp_path}/lifeboat.yaml:4"
    assert loaded.origins["engine.native_block_tokens"] == f"{tmp_path}/base.yaml:7"


def test_a_problem_in_the_base_names_the_base(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "\nengine: {io_workers: 99}\n")
    message = problem(tmp_path, "extends: base.yaml\nengine: {native_block_tokens: 16}\n")
    assert message.startswith("base.yaml:2: engine.io_workers: 99 is not allowed")


def test_circles_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "b.yaml", "extends: link.yaml\n")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "lifeboat.yaml")
    message = problem(tmp_path, "extends: b.yaml\n")
    assert "extends goes round in a circle" in message
    assert "b.yaml -> " in message


# --- compression -----------------------------------------------------------------------------


def test_codecs_by_default(tmp_path: Path) -> None:
    config = load(tmp_path, "").config
    assert config.compression.ladder.local == "fp8"
    assert config.compression.lossless_8bit == "remote"
    assert config.engine.native_codec == "exact"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("turboquant4", "lbq4"),
        ("turboquant3", "lbq3"),
        ("oscar2", "lbq2"),
        ("auto", "auto"),
        ("dense", "dense"),
    ],
)
def test_names_of_codecs(tmp_path: Path, written: str, meant: str) -> None:
    loaded = load(tmp_path, f"compression: {{ladder: {{local: {written}}}}}")
    assert loaded.config.compression.ladder.local == meant


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "compression: {ladder: {local: losless}}",
            "compression.ladder.local: there is no codec 'losless'; did you mean 'lossless'? Allow",
        ),
        ("compression: {ladder: {local: turboquant}}", "did you mean 'turboquant"),
        ("compression: {ladder: {local: gzip}}", "there is no codec 'gzip'. Allowed: raw,"),
        ("compression: {ladder: {local: 8}}", "8 is not the name of a codec. Allowed: raw,"),
        (
            "compression: {ladder: fp8}",
            "'fp8' instead of a mapping. Write keys below it: local, shared",
        ),
        ("compression: {ladder: {lokal: fp8}}", "unknown key. Did you mean 'local'?"),
        ("compression: {lossless_8bit: maybe}", "'maybe' is not allowed. Allowed: on, remote or"),
        ("engine: {native_codec: fp8}", "'fp8' is not allowed. Allowed: exact or ladder."),
    ],
)
def test_codecs_that_do_not_exist(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in problem(tmp_path, text)


@pytest.mark.parametrize(
    ("written", "meant"), [("on", "on"), ("off", "off"), ("true", "on"), ("remote", "remote")]
)
def test_lossless_8bit_as_yaml_reads_it(tmp_path: Path, written: str, meant: str) -> None:
    loaded = load(tmp_path, f"compression: {{lossless_8bit: {written}}}")
    assert loaded.config.compression.lossless_8bit == meant


def test_presets_of_codecs(tmp_path: Path) -> None:
    accurate = load(tmp_path, "extends: max_accuracy").config
    assert (accurate.compression.ladder.local, accurate.engine.native_codec) == (
        "lossless",
        "exact",
    )
    small = load(tmp_path, "extends: storage_efficient\nengine: {native_codec: exact}").config
    assert (small.compression.ladder.local, small.engine.native_codec) == ("lbq3", "exact")
    assert small.compression.lossless_8bit == "on"


# --- presets, template, reference, import ----------------------------------------------------


def test_every_preset_is_valid() -> None:
    assert "single_node_gpu" in preset_names()
    for name in preset_names():
        assert load_config(preset_path(name), ENVIRON).config.storage.places


@pytest.mark.parametrize("preset", [None, *preset_names()])
def test_the_template_means_what_it_started_from(tmp_path: Path, preset: str | None) -> None:
    text = render_template(preset)
    assert max(len(line) for line in text.splitlines()) <= 100
    base = "" if preset is None else f"extends: {preset}\n"
    assert load(tmp_path, text).config == load(tmp_path / "b", base).config


@pytest.mark.parametrize("preset", [None, *preset_names()])
def test_every_commented_key_of_the_template_can_be_set(tmp_path: Path, preset: str | None) -> None:
    lines = [
        line.removeprefix("#")
        for line in render_template(preset).splitlines()
        if not line.lstrip().startswith("##")
    ]
    loaded = load(tmp_path, "\n".join(lines))
    shown = set(loaded.origins)
    assert "storage.tiers[0].direct_io" in shown
    for section in ("engine", "security"):
        for key in type(getattr(loaded.config, section)).model_fields:
            assert f"{section}.{key}" in shown
    if preset is None:
        assert loaded.config.engine == load_config(environ=ENVIRON).config.engine


def test_the_reference_page_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs/configuration.md"
    assert page.read_text(encoding="utf-8") == render_reference(), (
        "run: python -m lifeboat_cache.config.reference > docs/configuration.md"
    )


def test_every_key_is_described() -> None:
    from lifeboat_cache.config.describe import entries

    found = [entry for _, _, own in entries() for entry in own]
    assert len(found) == 52
    for entry in found:
        assert entry.field.description, entry.path
        assert entry.key.allowed, entry.path
        example = yaml.safe_load(f"x: {entry.key.example}")["x"]
        assert example is not None, entry.path


def test_importing_needs_neither_an_engine_nor_yaml() -> None:
    code = (
        "import sys; import lifeboat_cache.config as c; c.load_config(environ={'HOME': '/h'}); "
        "print(sorted({'torch', 'vllm', 'numpy', 'numba', 'yaml'} & set(sys.modules)))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_the_public_names_are_sorted_and_there() -> None:
    names = lifeboat_cache.config.__all__
    assert names == sorted(names, key=lambda name: (name.upper() != name, name[0].islower(), name))
    for name in names:
        assert hasattr(lifeboat_cache.config, name)


@pytest.mark.parametrize(
    "text",
    [
        "dashboard: {port: 9402, enabled: false}",
        "dashboard: {port: 9402, host: 10.0.0.1}",
        "telemetry: {prometheus: {port: 0}}",
    ],
)
def test_one_port_for_two_services_that_do_not_meet(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    found = load_config(file, {"HOME": str(tmp_path)}).config
    assert (found.dashboard.port == 9402) is ("9402" in text)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="a pipe that nobody writes to"):
        load_config(pipe, {"HOME": str(tmp_path)})
    # One that somebody writes to is read to its end, as the shell's <(...) is.
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as file:
            file.write(b"dashboard: {port: 9500}")

    writer = threading.Timer(0.1, write)
    writer.start()
    loaded = load_config(Path(f"/dev/fd/{reading}"), {"HOME": str(tmp_path)})
    writer.join()
    os.close(reading)
    assert loaded.config.dashboard.port == 9500


def test_a_file_of_another_kind_is_not_read_to_its_end(tmp_path: Path) -> None:
    large = tmp_path / "model.safetensors"
    with large.open("wb") as file:
        file.truncate(1 << 40)
    for path in (large, Path("/dev/zero")):
        with pytest.raises(ConfigError, match="longer than 1,048,576 bytes"):
            load_config(path, {"HOME": str(tmp_path)})
