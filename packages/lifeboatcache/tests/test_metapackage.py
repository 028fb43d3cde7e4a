"""The metapackage brings what the documentation promises, and holds nothing itself."""

import tomllib
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]


def _project(directory: Path) -> dict[str, Any]:
    data: dict[str, Any] = tomllib.loads((directory / "pyproject.toml").read_text())
    return data


def test_bare_install_brings_core_the_dashboard_and_the_adapters() -> None:
    dependencies = _project(_PACKAGE)["project"]["dependencies"]
    names = {dependency.partition("~=")[0] for dependency in dependencies}
    assert names == {
        "lifeboatcache-core",
        "lifeboatcache-dashboard",
        "lifeboatcache-sglang",
        "lifeboatcache-vllm",
    }


def test_what_it_brings_is_in_this_tree() -> None:
    for dependency in _project(_PACKAGE)["project"]["dependencies"]:
        name = dependency.partition("~=")[0]
        assert _project(_PACKAGE.parent / name)["project"]["name"] == name


def test_an_extra_brings_nothing_that_is_not_in_this_tree() -> None:
    extras = _project(_PACKAGE)["project"]["optional-dependencies"]
    assert set(extras) == {"lmcache", "mlx", "s3", "sglang", "vllm"}
    for dependency in (one for wanted in extras.values() for one in wanted):
        whole, _, version = dependency.partition("~=")
        name, _, extra = whole.rstrip("]").partition("[")
        project = _project(_PACKAGE.parent / name)["project"]
        assert project["name"] == name
        if "version" in project:  # core's is in a module
            assert project["version"].startswith(version.rpartition(".")[0])
        assert not extra or extra in project["optional-dependencies"]


def test_the_extra_that_brings_lmcache_brings_a_tested_one() -> None:
    extras = _project(_PACKAGE.parent / "lifeboatcache-lmcache")["project"]["optional-dependencies"]
    assert extras == {"lmcache": ["lmcache==0.5.6"]}


def test_it_holds_no_code() -> None:
    assert not (_PACKAGE / "src").exists()
    wheel = _project(_PACKAGE)["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"bypass-selection": True}
