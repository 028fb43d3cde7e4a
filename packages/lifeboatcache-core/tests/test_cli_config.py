from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lifeboat_cache.cli import plugins
from lifeboat_cache.cli.main import main
from lifeboat_cache.cli.parser import EXIT_CODES, build_parser
from lifeboat_cache.cli.reference import render_reference
from lifeboat_cache.version import __version__

CODE = "import sys; from lifeboat_cache.cli.main import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LIFEBOAT_CACHE_CONFIG", "LIFEBOAT_CACHE_NAMESPACE_SALT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(
    *args: str, path: tuple[Path, ...] = (), stdin: str | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    search = [*map(str, path), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, "-c", CODE, *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search), **environ},
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# --- init ------------------------------------------------------------------------------------


def test_init_writes_a_private_file_that_is_valid(home: Path) -> None:
    done = run("init", "--preset", "single_node_gpu")
    assert done.returncode == 0, done.stderr
    file = home / "lifeboat.yaml"
    assert file.stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700
    assert f"Wrote {file}" in done.stdout
    assert "lifeboat-cache config validate" in done.stdout
    assert "LIFEBOAT_CACHE_CONFIG" not in done.stdout
    assert yaml.safe_load(file.read_text())["storage"]["tiers"][0]["capacity_gb"] == 200
    checked = run("config", "validate")
    assert checked.returncode == 0
    assert checked.stdout.startswith(f"{file} (home directory): valid\n")
    assert f"nvme ({home}/nvme), fallback_local ({home}/kv)" in checked.stdout


def test_init_is_private_whatever_the_umask(home: Path) -> None:
    previous = os.umask(0)
    try:
        assert main(["init"]) == 0
    finally:
        os.umask(previous)
    assert (home / "lifeboat.yaml").stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700


def test_init_never_overwrites_without_force(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.mkdir()
    file = home / "lifeboat.yaml"
    file.write_text("engine: {io_workers: 2}\n")
    file.chmod(0o644)
    assert main(["init"]) == 2
    assert "Add --force" in capsys.readouterr().err
    assert file.read_text() == "engine: {io_workers: 2}\n"
    assert main(["init", "--force"]) == 0
    assert "##" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in home.iterdir()] == ["lifeboat.yaml"]


def test_init_does_not_write_through_a_dangling_link(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.mkdir()
    (home / "lifeboat.yaml").symlink_to(tmp_path / "elsewhere")
    assert main(["init"]) == 2
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("options", [["--path"], ["--config"]])
def test_init_elsewhere_says_how_to_use_it(
    tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "deep/er/mine.yaml"
    assert main(["init", *options, str(file)]) == 0
    out = capsys.readouterr().out
    assert f"export LIFEBOAT_CACHE_CONFIG={file}" in out
    assert f"lifeboat-cache --config {file} doctor" in out
    assert main(["--config", str(file), "config", "validate"]) == 0


def test_init_at_the_named_file_needs_no_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "named.yaml"
    monkeypatch.setenv("LIFEBOAT_CACHE_CONFIG", str(file))
    assert main(["init", "--path", str(file)]) == 0
    assert "export" not in capsys.readouterr().out
    # But one in the home directory would not be read.
    assert main(["init"]) == 0
    assert "export LIFEBOAT_CACHE_CONFIG=" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--preset", "single_node"], "Did you mean 'single_node_gpu'?"),
        (["--path", "/"], "is a directory"),
        (["--path", "$NO_SUCH/x"], "'NO_SUCH'"),
        (["--path", "/proc/x/y"], "cannot be written"),
    ],
)
def test_init_errors(args: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lifeboat-cache: error: ")
    assert expected in err


# --- config ----------------------------------------------------------------------------------


def test_show_tells_where_each_value_comes_from(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home.mkdir()
    file = home / "lifeboat.yaml"
    file.write_text(
        "extends: single_node_gpu\nengine: {io_workers: 2}\nsecurity: {namespace_salt: hush}\n"
    )
    assert main(["config", "show"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert lines["engine.io_workers"] == ["2", f"{file}:2"]
    assert lines["engine.native_promotion_wait_s"] == ["5", "default"]
    assert lines["storage.tiers[0].capacity_gb"][0] == "200"
    assert "single_node_gpu.yaml:" in lines["storage.tiers[0].capacity_gb"][1]
    assert lines["security.namespace_salt"] == ['"********"', f"{file}:3"]
    monkeypatch.setenv("LIFEBOAT_CACHE_NAMESPACE_SALT", "hush2")
    assert main(["config", "show", "--json"]) == 0
    out += capsys.readouterr().out
    document = json.loads(out[out.index("{") :])
    assert document["config"]["engine"]["io_workers"] == 2
    assert document["config"]["storage"]["fallback_local"]["path"] == f"{home}/kv"
    assert document["origins"]["security.namespace_salt"] == "$LIFEBOAT_CACHE_NAMESPACE_SALT"
    assert document["files"][0] == str(file)
    assert document["home"] == str(home)
    assert "hush" not in out


def test_show_without_a_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show"]) == 0
    out = capsys.readouterr().out
    assert "built-in defaults" in out
    (unset,) = (line.split() for line in out.splitlines() if "(none)" in line)
    assert unset == ["security.integrity_key", "(none)", "default"]
    assert not home.exists()


def test_validate_reports_without_a_traceback(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("storge: {}\nengine: {io_workers: 0}\n")
    for args in (("config", "validate", str(file)), ("--config", str(file), "config", "validate")):
        done = run(*args)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("lifeboat-cache: error: 2 problems in the configuration:\n")
        assert f"{file}:1: storge: unknown key. Did you mean 'storage'?" in done.stderr
        assert "Traceback" not in done.stderr


def test_validate_says_who_named_a_file_that_is_not_there(tmp_path: Path) -> None:
    file = str(tmp_path / "absent.yaml")
    assert "but the command line names it" in run("config", "validate", file).stderr
    assert "but --config names it" in run("--config", file, "config", "validate").stderr


# --- the command -----------------------------------------------------------------------------


def test_version_and_help() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"lifeboat-cache {__version__}\n")
    done = run("--help")
    assert done.returncode == 0
    for code, meaning in EXIT_CODES.items():
        assert f"  {code:<4} {meaning}\n" in done.stdout
    for command in ("init", "config", "ls", "purge", "check", "doctor"):
        assert f"    {command} " in done.stdout


@pytest.mark.parametrize("args", [[], ["nope"], ["config"], ["purge"], ["ls", "--nope"]])
def test_wrong_usage_is_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert "usage: lifeboat-cache" in capsys.readouterr().err


def test_the_config_option_works_before_and_after_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("engine: {io_workers: 3}\n")
    for args in (
        ["--config", str(file), "config", "show", "--json"],
        ["config", "show", "--json", "--config", str(file)],
    ):
        assert main(args) == 0
        assert json.loads(capsys.readouterr().out)["config"]["engine"]["io_workers"] == 3


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    script = f'"{sys.executable}" -c "{CODE}" config show --json; echo "code $?" >&2'
    done = subprocess.run(
        ["bash", "-c", f"( {script} ) | true"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    # `true` has ended long before Python is up.
    assert done.stderr == "code 141\n"


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lifeboat_cache.cli.config_commands.load_config", interrupted)
    assert main(["config", "show"]) == 130


def test_a_disk_error_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise OSError(5, "Input/output error", "/dev/disk")

    monkeypatch.setattr("lifeboat_cache.cli.config_commands.load_config", broken)
    assert main(["config", "show"]) == 2
    assert capsys.readouterr().err == "lifeboat-cache: error: /dev/disk: Input/output error\n"


def test_a_terminal_that_cannot_show_a_letter(tmp_path: Path) -> None:
    file = tmp_path / "ü.yaml"
    file.write_text("engine: {io_workers: 3}\n")
    done = run("config", "validate", str(file), PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "\\xfc.yaml" in done.stdout


def test_the_reference_page_is_up_to_date() -> None:
    page = Path(__file__).parents[3] / "docs/cli.md"
    assert page.read_text(encoding="utf-8") == render_reference(), (
        "run: python -m lifeboat_cache.cli.reference > docs/cli.md"
    )


def test_the_parser_loads_no_command() -> None:
    code = (
        "import sys; from lifeboat_cache.cli.parser import build_parser; build_parser(); "
        "print(sorted(n for n in sys.modules if n.startswith('lifeboat_cache.targets')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


# --- commands of other distributions ---------------------------------------------------------

GOOD = """
def add(subparsers):
    parser = subparsers.add_parser("extra", help="an extra command")
    parser.add_argument("--times", type=int, default=1)
    parser.set_defaults(func=run)

def run(args):
    print("extra" * args.times, args.config)
    return 7
"""


def distribution(root: Path, name: str, module: str, source: str | None, *groups: str) -> None:
    info = root / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(groups))
    if source is not None:
        (root / f"{module}.py").write_text(source)


def test_commands_of_other_distributions(tmp_path: Path) -> None:
    root = tmp_path / "site"
    group = "[lifeboat_cache.cli]\n"
    distribution(root, "good-one", "good_one", GOOD, f"{group}b = good_one:add")
    distribution(root, "broken-one", "broken_one", "1 / 0", f"{group}a = broken_one:add")
    distribution(root, "missing-one", "missing_one", None, f"{group}c = missing_one:add")
    clash = "def add(subparsers):\n    subparsers.add_parser('doctor')\n"
    distribution(root, "clashing-one", "clashing_one", clash, f"{group}d = clashing_one:add")
    leave = "def add(subparsers):\n    raise SystemExit('no')\n"
    distribution(root, "leaving-one", "leaving_one", leave, f"{group}e = leaving_one:add")
    done = run("--config", "x", "extra", "--times", "2", path=(root,))
    assert (done.returncode, done.stdout) == (7, "extraextra x\n")
    warnings = done.stderr.splitlines()
    assert len(warnings) == 4
    for name, error in (
        ("broken-one", "ZeroDivisionError"),
        ("missing-one", "ModuleNotFoundError"),
        ("clashing-one", "ArgumentError"),
        ("leaving-one", "SystemExit"),
    ):
        assert any(f"the commands of {name}" in w and error in w for w in warnings), warnings
        assert "Traceback" not in done.stderr
    # The command that somebody tried to replace is still ours.
    assert run("doctor", "--help", path=(root,)).stdout.count("--fix") == 2


def test_a_command_without_a_function_is_a_sentence(tmp_path: Path) -> None:
    source = "def add(subparsers):\n    subparsers.add_parser('idle')\n"
    distribution(tmp_path, "idle-one", "idle_one", source, "[lifeboat_cache.cli]\nx = idle_one:add")
    done = run("idle", path=(tmp_path,))
    assert done.returncode == 2
    assert "sets no function" in done.stderr


@pytest.mark.parametrize("rest", [(), ("--model", "x", "-h"), ("--", "--l1-size-gb", "1")])
def test_a_command_of_a_distribution_that_is_missing_says_which(
    rest: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugins, "ELSEWHERE", {"pages": "lifeboatcache-pages"})
    assert main(["pages", *rest]) == 2
    said = capsys.readouterr().err
    assert "`pages` is a command of lifeboatcache-pages, which is not installed" in said
    assert "install it there" in said
    main(["--help"])
    assert "pages" not in capsys.readouterr().out


def test_our_other_commands_are_those_that_are_added_elsewhere() -> None:
    root = Path(__file__).parents[2]
    for command, name in plugins.ELSEWHERE.items():
        sources = (root / name / "src").rglob("*command.py")
        assert any(f'"{command}"' in source.read_text() for source in sources), command


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert "write a configuration file" in captured.err
    assert not captured.out


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("first", "to the first usable of: disk (/d), nas (/n), fallback_local"),
        ("all", "to all of: disk (/d), nas (/n); to fallback_local"),
        ("local_first", "to the fastest, and from there to slower ones, of: disk (/d), nas (/n);"),
    ],
)
def test_validate_says_where_kv_goes(
    mode: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(
        f"storage:\n  write_mode: {mode}\n  tiers:\n"
        "  - {name: disk, type: filesystem, path: /d}\n  - {name: nas, type: nfs, path: /n}\n"
    )
    assert main(["config", "validate", str(file)]) == 0
    assert words in capsys.readouterr().out


def test_every_command_is_documented() -> None:
    page = render_reference()
    commands = ("ls", "purge", "check", "doctor", "selftest")
    for command in ("init", "config show", "config validate", *commands):
        assert f"## `lifeboat-cache {command}`\n" in page
    assert "None" not in page
    assert "purge [--config FILE] (--namespace" in page
    assert "ls [--config FILE] [--json] [NAMESPACE]" in page
    assert build_parser(plugins=False).prog == "lifeboat-cache"
