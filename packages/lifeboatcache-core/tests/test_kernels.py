"""Compiled kernels on disk: made by compile_all(), only ever read by load()."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lifeboat_cache import kernels
from lifeboat_cache.kernels import cache

SOURCE = Path(kernels.__file__).parents[2]

#: Says what load() or compile_all() answers, and whether every kernel came from disk.
ASK = """
import json, sys
from lifeboat_cache import kernels
kernels.MODULES = ("xxh3",)
numba_before = "numba" in sys.modules
answer = getattr(kernels, sys.argv[1])()
stats = []
if kernels.ready():
    from lifeboat_cache.kernels import xxh3
    stats = [
        [sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values())]
        for kernel in (xxh3.xxh3_of, xxh3.xxh3_blocks)
    ]
    import numpy as np
    data = np.arange(1000, dtype=np.uint8)
    out = np.zeros(16, dtype=np.uint8)
    xxh3.xxh3_of(np.array([data.ctypes.data], np.uint64), np.array([1000], np.uint64), out)
    assert out.tobytes().hex() == "076f7e02b7120d2ad33dd80b46f60e50", out.tobytes().hex()
print(json.dumps({
    "answer": answer, "ready": kernels.ready(), "reason": kernels.reason(),
    "numba": "numba" in sys.modules, "stats": stats,
}))
"""


def start(
    what: str, home: Path | str, source: Path = SOURCE, before: str = "", **environ: str
) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "LIFEBOAT_"))}
    return subprocess.Popen(
        [sys.executable, "-c", before + ASK, what],
        env={**kept, "PYTHONPATH": str(source), "LIFEBOAT_CACHE_HOME": str(home), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(process: subprocess.Popen[str]) -> dict[str, object]:
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    answer: dict[str, object] = json.loads(out)
    return answer


def ask(
    what: str, home: Path | str, source: Path = SOURCE, before: str = "", **environ: str
) -> dict[str, object]:
    return told(start(what, home, source, before, **environ))


@pytest.fixture(scope="session")
def small_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the kernels of one module, compiled by another process."""
    home = tmp_path_factory.mktemp("kernels")
    answer = ask("compile_all", home)
    assert answer["answer"] is True, answer["reason"]
    return home


@pytest.fixture
def home(small_home: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(small_home, tmp_path / "home"))


def the_set(home: Path) -> Path:
    (found,) = (home / "kernels").iterdir()
    return found


def content(home: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in the_set(home).iterdir()}


def test_load_does_not_compile_and_does_not_import_numba(tmp_path: Path) -> None:
    answer = ask("load", tmp_path / "none")
    assert (answer["answer"], answer["ready"], answer["numba"]) == (False, False, False)
    assert "python -m lifeboat_cache.kernels" in str(answer["reason"])
    assert not (tmp_path / "none").exists()


def test_load_takes_everything_from_disk(small_home: Path) -> None:
    before = content(small_home)
    answer = ask("load", small_home)
    assert answer["answer"] is True
    assert answer["reason"] == ""
    assert answer["stats"] == [[1, 0], [1, 0]]
    assert content(small_home) == before


def test_a_complete_set_is_not_compiled_again(small_home: Path) -> None:
    before = content(small_home)
    answer = ask("compile_all", small_home)
    assert answer["stats"] == [[1, 0], [1, 0]]
    assert content(small_home) == before


def test_files_are_private(small_home: Path) -> None:
    made = the_set(small_home)
    assert made.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in made.iterdir()} == {0o600}


def test_a_reinstallation_with_other_times_loads_the_same_set(home: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.copytree(SOURCE, tmp_path / "other", copy_function=shutil.copy))
    for path in elsewhere.rglob("*.py"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    assert ask("load", home, elsewhere)["answer"] is True


def test_other_sources_are_other_kernels(home: Path, tmp_path: Path) -> None:
    elsewhere = Path(shutil.copytree(SOURCE, tmp_path / "other"))
    with (elsewhere / "lifeboat_cache" / "kernels" / "raw.py").open("a") as stream:
        stream.write("# edited\n")
    assert ask("load", home, elsewhere)["answer"] is False


@pytest.mark.parametrize(
    ("setting", "value"),
    [("NUMBA_CPU_NAME", "generic"), ("NUMBA_CPU_FEATURES", ""), ("NUMBA_OPT", "1")],
)
def test_code_made_with_other_settings_is_not_loaded(home: Path, setting: str, value: str) -> None:
    answer = ask("load", home, before=f"import os; os.environ[{setting!r}] = {value!r}\n")
    assert answer["answer"] is False


def test_the_key_covers_processor_and_versions() -> None:
    assert set(cache.facts()) == {
        "core",
        "cpu",
        "features",
        "llvmlite",
        "machine",
        "numba",
        "python",
        "settings",
        "sources",
    }


def test_settings_of_numba_s_own_cache_change_nothing(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "numba"
    answer = ask(
        "load",
        home,
        NUMBA_CACHE_DIR=str(other),
        NUMBA_CACHE_LOCATOR_CLASSES="UserWideCacheLocator",
    )
    assert answer["stats"] == [[1, 0], [1, 0]]
    assert not other.exists()


def damage(home: Path) -> None:
    path = next(path for path in sorted(the_set(home).iterdir()) if path.suffix == ".nbc")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lose_a_file(home: Path) -> None:
    next(path for path in sorted(the_set(home).iterdir()) if path.suffix == ".nbi").unlink()


def empty_the_marker(home: Path) -> None:
    (the_set(home) / cache.MARKER).write_bytes(b"")


def forget_the_files(home: Path) -> None:
    (the_set(home) / cache.MARKER).write_text('{"files": {}}')


def make_the_marker_another(home: Path) -> None:
    (the_set(home) / cache.MARKER).write_text('{"files": [1]}')


def open_to_others(home: Path) -> None:
    the_set(home).chmod(0o777)


def give_a_file_away(home: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(next(path for path in the_set(home).iterdir() if path.suffix == ".nbc"), 4321, 4321)


@pytest.mark.parametrize(
    "harm",
    [
        damage,
        lose_a_file,
        empty_the_marker,
        forget_the_files,
        make_the_marker_another,
        open_to_others,
        give_a_file_away,
    ],
)
def test_a_harmed_set_is_refused(home: Path, harm: Callable[[Path], None]) -> None:
    harm(home)
    refused = ask("load", home)
    assert refused["answer"] is False
    assert "remove" in str(refused["reason"])
    assert refused["numba"] is False


def test_a_harmed_set_is_compiled_anew(home: Path) -> None:
    damage(home)
    assert ask("compile_all", home)["answer"] is True
    again = ask("load", home)
    assert again["stats"] == [[1, 0], [1, 0]]


def test_code_that_the_marker_does_not_know_is_not_compiled_by_load(home: Path) -> None:
    # A set whose digests are right and that lacks a kernel all the same.
    marker = the_set(home) / cache.MARKER
    document = json.loads(marker.read_bytes())
    (lost,) = (name for name in document["files"] if name.startswith("xxh3.xxh3_of.nbi"))
    del document["files"][lost]
    (the_set(home) / lost).unlink()
    marker.write_text(json.dumps(document))
    answer = ask("load", home)
    assert answer["answer"] is False
    assert "has no code for xxh3.xxh3_of" in str(answer["reason"])


def test_processes_that_compile_at_the_same_time_agree(tmp_path: Path) -> None:
    processes = [start("compile_all", tmp_path) for _ in range(2)]
    assert [told(process)["answer"] for process in processes] == [True] * 2
    assert [path.name for path in (tmp_path / "kernels").iterdir()] == [the_set(tmp_path).name]
    assert ask("load", tmp_path)["answer"] is True


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    old, new = (tmp_path / "kernels" / f".{name}.tmp" for name in ("old", "new"))
    for place in (old, new):
        place.mkdir(parents=True)
    long_ago = time.time() - 2 * 3600
    os.utime(old, (long_ago, long_ago))
    assert ask("compile_all", tmp_path)["answer"] is True
    assert (old.exists(), new.exists()) == (False, True)


def test_a_home_that_cannot_be_written_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for what in ("load", "compile_all"):
        answer = ask(what, tmp_path / "file")
        assert (answer["answer"], answer["ready"]) == (False, False)
        assert answer["reason"]


def test_a_home_that_cannot_be_known_is_a_reason() -> None:
    for what in ("load", "compile_all"):
        answer = ask(what, "$LIFEBOAT_UNSET_VARIABLE/home")
        assert answer["answer"] is False
        assert "LIFEBOAT_UNSET_VARIABLE" in str(answer["reason"])


def test_numba_that_may_not_compile_is_a_reason(home: Path) -> None:
    for what in ("load", "compile_all"):
        answer = ask(what, home, NUMBA_DISABLE_JIT="1")
        assert answer["answer"] is False
        assert "NUMBA_DISABLE_JIT" in str(answer["reason"])


def test_no_numba_is_a_reason(home: Path) -> None:
    for what in ("load", "compile_all"):
        answer = ask(what, home, before="import sys; sys.modules['llvmlite'] = None\n")
        assert answer["answer"] is False
        assert "numba is not installed" in str(answer["reason"])


def test_a_set_removed_under_a_process_is_made_again(home: Path) -> None:
    code = (
        "import shutil\nfrom lifeboat_cache import kernels\n"
        "kernels.MODULES = ('xxh3',)\nassert kernels.load()\n"
        f"shutil.rmtree({str(home / 'kernels')!r})\n"
    )
    assert ask("compile_all", home, before=code)["answer"] is True
    assert ask("load", home)["stats"] == [[1, 0], [1, 0]]


def test_a_kernel_does_not_compile_for_other_types(kernels_on: None) -> None:
    from lifeboat_cache.kernels import xxh3

    before = len(xxh3.xxh3_of.signatures)
    with pytest.raises(TypeError):
        xxh3.xxh3_of(np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(16, np.int32))
    assert len(xxh3.xxh3_of.signatures) == before


def test_every_module_is_loaded_from_disk(kernel_home: Path) -> None:
    code = (
        "from lifeboat_cache import kernels\n"
        "assert kernels.load(), kernels.reason()\n"
        "from lifeboat_cache.kernels import jit\n"
        "print(sorted(jit._registered))"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "LIFEBOAT_"))}
    environ = {**kept, "PYTHONPATH": str(SOURCE), "LIFEBOAT_CACHE_HOME": str(kernel_home)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in kernels.MODULES:
        assert (SOURCE / "lifeboat_cache" / "kernels" / f"{name}.py").is_file()
    assert "'xxh3.xxh3_blocks'" in done.stdout


def test_the_command_compiles_and_measures(home: Path) -> None:
    shutil.rmtree(home / "kernels")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "LIFEBOAT_"))}
    environ = {**kept, "PYTHONPATH": str(SOURCE)}
    code = (
        "import runpy\nfrom lifeboat_cache import kernels\nkernels.MODULES = ('xxh3',)\n"
        "from lifeboat_cache.codecs import speed\n"
        "from lifeboat_cache.codecs.rates import CodecRate\n"
        "speed.measure_codecs = lambda: {\n"
        "    (dtype, codec): CodecRate(1e9, 1.0)\n"
        "    for dtype in speed.MEASURED_DTYPES for codec in range(len(speed.CODEC_NAMES))}\n"
        "runpy.run_module('lifeboat_cache.kernels.__main__', run_name='__main__')"
    )
    for place, expected in ((home, 0), (home / "kernels", 0), (Path(os.devnull), 1)):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**environ, "LIFEBOAT_CACHE_HOME": str(place)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == expected, done.stderr
        assert ("are ready, codecs measured" in done.stdout) == (not expected)
        assert (len(list(place.glob("speeds/codecs-*.json"))) == 1) == (not expected)
