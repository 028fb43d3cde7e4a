"""vLLM's plugin entry point never breaks a launch."""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import lifeboat_entry
import lifeboat_vllm_entry

_OURS = [Path(str(module.__file__)).parent for module in (lifeboat_vllm_entry, lifeboat_entry)]
_LAUNCH = "import lifeboat_vllm_entry; lifeboat_vllm_entry.register(); print('launched')"


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
    (plugin,) = entry_points(group="vllm.general_plugins", name="lifeboat_cache")
    assert plugin.value == "lifeboat_vllm_entry:register"
    (doctor,) = entry_points(group="lifeboat_cache.doctor", name="vllm")
    assert doctor.value == "lifeboat_cache.integrations.vllm_doctor:checks"


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
