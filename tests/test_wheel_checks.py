"""The check of built wheels finds each mistake that it is there for."""

import zipfile
from pathlib import Path

import pytest
from devkit.wheels import check_wheels

_Wheels = dict[str, tuple[str, list[str], list[str]]]


def _wheels() -> _Wheels:
    """Version, requirements and files of wheels that are right."""
    return {
        "lifeboatcache-core": (
            "1.2.3",
            ["numpy>=1.26", 'boto3>=1; extra == "s3"'],
            ["lifeboat_cache/py.typed", "lifeboat_cache/config/__init__.py", "lifeboat_entry.py"],
        ),
        "lifeboatcache-vllm": (
            "0.4.0",
            ["lifeboatcache-core~=1.2.0"],
            ["lifeboat_cache/integrations/vllm_tier.py", "lifeboat_vllm_entry.py"],
        ),
        "lifeboatcache-sglang": (
            "0.3.1",
            ["lifeboatcache-core~=1.2.0"],
            ["lifeboat_cache/integrations/sglang_backend.py", "lifeboat_sglang_entry.py"],
        ),
        "lifeboatcache-dashboard": (
            "0.2.0",
            ["fastapi>=0.110", "lifeboatcache-core~=1.2.0"],
            ["lifeboat_cache/dashboard/app.py"],
        ),
        "lifeboatcache-mlx": (
            "0.3.1",
            ["lifeboatcache-core~=1.2.0"],
            ["lifeboat_cache/mlx/__init__.py"],
        ),
        "lifeboatcache-lmcache": (
            "0.5.0",
            ["lifeboatcache-core~=1.2.0", 'lmcache==0.5.6; extra == "lmcache"'],
            ["lifeboat_cache/integrations/lmcache_adapter.py"],
        ),
        "lifeboatcache": (
            "0.1.0",
            [
                "lifeboatcache-core~=1.2.3",
                "lifeboatcache-dashboard~=0.2.0",
                "lifeboatcache-sglang~=0.3.0",
                "lifeboatcache-vllm~=0.4.0",
                'lifeboatcache-sglang~=0.3.0; extra == "sglang"',
                'lifeboatcache-lmcache[lmcache]~=0.5.0; extra == "lmcache"',
            ],
            [],
        ),
    }


def _check(wheels: _Wheels, directory: Path) -> list[str]:
    files = []
    for name, (version, requires, content) in wheels.items():
        stem = f"{name.replace('-', '_')}-{version}"
        metadata = [f"Name: {name}", f"Version: {version}"]
        metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
        files.append(directory / f"{stem}-py3-none-any.whl")
        with zipfile.ZipFile(files[-1], "w") as archive:
            archive.writestr(f"{stem}.dist-info/METADATA", "\n".join(metadata))
            for path in content:
                archive.writestr(path, "")
        log = directory / "packages" / name / "CHANGELOG.md"
        log.parent.mkdir(parents=True)
        log.write_text(f"# Changes\n\n## {version}\n\n- New.\n\n## 0.0.1\n")
    return check_wheels(files, packages=directory / "packages")


def test_right_wheels_pass(tmp_path: Path) -> None:
    assert _check(_wheels(), tmp_path) == []


@pytest.mark.parametrize(
    ("name", "path", "problem"),
    [
        ("lifeboatcache-core", "lifeboat_cache/__init__.py", "hides"),
        ("lifeboatcache-vllm", "lifeboat_cache/__init__.py", "hides"),
        ("lifeboatcache-vllm", "lifeboat_cache/__init__.pyi", "hides"),
        ("lifeboatcache-vllm", "lifeboat_cache/integrations/__init__.py", "hides"),
        ("lifeboatcache-vllm", "lifeboat_entry.py", "lifeboatcache-core and lifeboatcache-vllm"),
        ("lifeboatcache-vllm", "lifeboat_cache/py.typed", "leave it to one of them"),
        ("lifeboatcache", "tests/test_it.py", "outside lifeboat_"),
    ],
)
def test_wrong_file_is_found(tmp_path: Path, name: str, path: str, problem: str) -> None:
    wheels = _wheels()
    wheels[name][2].append(path)
    (found,) = _check(wheels, tmp_path)
    assert path in found
    assert name in found
    assert problem in found


@pytest.mark.parametrize(
    ("name", "requires", "problem"),
    [
        ("lifeboatcache-vllm", "lifeboatcache-core~=1.3.0", "does not admit"),
        ("lifeboatcache-vllm", "lifeboatcache-core~=1.2.4", "does not admit"),
        ("lifeboatcache-vllm", "lifeboatcache-core>=1.2.0", "compatible range"),
        ("lifeboatcache-vllm", "lifeboatcache-core", "compatible range"),
        ("lifeboatcache-core", "numpy<3,>=1.26", "floor only"),
        ("lifeboatcache-core", "numba==0.65.0", "floor only"),
    ],
)
def test_wrong_pin_is_found(tmp_path: Path, name: str, requires: str, problem: str) -> None:
    wheels = _wheels()
    wheels[name][1][:] = [requires]
    (found,) = _check(wheels, tmp_path)
    assert requires in found
    assert problem in found


def test_changelog_must_begin_with_the_version(tmp_path: Path) -> None:
    wheels = _wheels()
    assert _check(wheels, tmp_path) == []
    log = tmp_path / "packages" / "lifeboatcache" / "CHANGELOG.md"
    log.write_text("# Changes\n\n## 0.2.0\n")
    (found,) = check_wheels(sorted(tmp_path.glob("*.whl")), packages=tmp_path / "packages")
    assert "lifeboatcache is 0.1.0" in found
    assert "begins with 0.2.0" in found


def test_missing_marker_is_found(tmp_path: Path) -> None:
    wheels = _wheels()
    wheels["lifeboatcache-core"][2].remove("lifeboat_cache/py.typed")
    (found,) = _check(wheels, tmp_path)
    assert "py.typed" in found


def test_missing_wheel_is_found(tmp_path: Path) -> None:
    wheels = _wheels()
    del wheels["lifeboatcache"]
    (found,) = _check(wheels, tmp_path)
    assert "expected one wheel of each" in found
