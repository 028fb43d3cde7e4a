"""SGLang's plugin entry point never breaks a launch."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import lifeboat_entry
import lifeboat_sglang_entry

_OURS = [Path(str(module.__file__)).parent for module in (lifeboat_sglang_entry, lifeboat_entry)]
_LAUNCH = "import lifeboat_sglang_entry; lifeboat_sglang_entry.register(); print('launched')"


def _launch(*path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        # -S: without the installed (editable) distributions, only what `path` says.
        [sys.executable, "-S", "-c", _LAUNCH],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_entry_points_are_registered() -> None:
    (plugin,) = entry_points(group="sglang.srt.plugins", name="lifeboat_cache")
    assert plugin.value == "lifeboat_sglang_entry:register"
    (doctor,) = entry_points(group="lifeboat_cache.doctor", name="sglang")
    assert doctor.value == "lifeboat_cache.integrations.sglang_doctor:checks"
    (selftest,) = entry_points(group="lifeboat_cache.selftest", name="sglang")
    assert selftest.value == "lifeboat_cache.integrations.sglang_selftest:run"


def test_foreign_package_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "lifeboat_cache").mkdir()
    (tmp_path / "lifeboat_cache" / "__init__.py").write_text("raise RuntimeError('foreign')\n")
    done = _launch(tmp_path, *_OURS)
    assert (done.returncode, done.stdout) == (0, "launched\n")
    (line,) = done.stderr.splitlines()
    assert "is off in this process" in line
    assert str(tmp_path) in line


def test_missing_core_is_one_warning() -> None:
    done = _launch(_OURS[0])
    assert (done.returncode, done.stdout) == (0, "launched\n")
    (line,) = done.stderr.splitlines()
    assert "reinstall lifeboatcache-core" in line


_QUIET = """
import sys
import lifeboat_sglang_entry
lifeboat_sglang_entry.register()
heavy = {"sglang", "torch", "numpy", "pydantic", "yaml", "lifeboat_cache.config"} & set(sys.modules)
assert not heavy, heavy
from sglang.srt.server_args import ServerArgs
assert hasattr(ServerArgs.resolve_once, "_lifeboat_activation") is SWITCHED_ON
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache import kv_cache_builder
assert hasattr(kv_cache_builder.build_kv_cache, "_lifeboat_fallback") is SWITCHED_ON
import importlib
from lifeboat_cache.integrations import sglang_epoch
for module, _, _ in sglang_epoch._METHODS:  # watched even where we are off
    importlib.import_module(module)
assert not any(type(finder).__name__ == "_Watch" for finder in sys.meta_path)
print("launched")
"""


@pytest.mark.parametrize("switched_on", [False, True])
def test_registering_imports_nothing_and_hooks_what_is_imported_later(switched_on: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _QUIET.replace("SWITCHED_ON", str(switched_on))],
        env={**os.environ, "LIFEBOAT_CACHE": "1" if switched_on else "0"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["launched"]), done.stderr
