from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

import lifeboat_cache.doctor.run
import lifeboat_cache.doctor.targets as doctor_targets
from lifeboat_cache.cli.main import main
from lifeboat_cache.config import Tier, load_config
from lifeboat_cache.doctor import Check, DoctorContext, Fix, run_checks
from lifeboat_cache.doctor.installation import (
    check_adapters,
    check_config,
    check_home,
    check_kernels,
    check_versions,
)
from lifeboat_cache.doctor.targets import check_targets
from lifeboat_cache.errors import TargetError
from lifeboat_cache.kernels import cache
from lifeboat_cache.targets.mounts import Mount, kind_of, mount_of

MOUNTINFO = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
23 22 0:21 / /dev/shm rw,nosuid - tmpfs tmpfs rw
24 22 0:22 / /data rw master:3 propagate_from:2 - overlay overlay rw,lowerdir=/a
25 24 0:23 / /data/my\\040disk rw - xfs /dev/nvme0n1 rw
26 22 0:24 / /data rw - nfs4 server:/export rw
27 22 0:25 / /database rw - btrfs /dev/sdb rw
not a line of mountinfo
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("LIFEBOAT_CACHE_CONFIG", "LIFEBOAT_CACHE_NAMESPACE_SALT"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    monkeypatch.setenv("LIFEBOAT_CACHE_HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def only_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the checks of whatever else is installed."""
    monkeypatch.setattr(lifeboat_cache.doctor.run, "GROUP", "lifeboat_cache.doctor.test")


def context(text: str = "", path: Path | None = None) -> DoctorContext:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return DoctorContext(os.environ, load_config(path))


def tier_checks(tmp_path: Path, keys: str) -> dict[str, Check]:
    text = (
        f"storage:\n  fallback_local: {{enabled: false}}\n  tiers:\n"
        f"    - {{name: t, type: filesystem, {keys}}}\n"
    )
    checks = list(check_targets(context(text, tmp_path / "t.yaml")))
    return {check.name.removeprefix("target t: "): check for check in checks}


# --- targets ---------------------------------------------------------------------------------


def test_a_target_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    checks = tier_checks(tmp_path, f"path: {tmp_path}/kv, capacity_gb: 1M, min_free_gb: 0")
    assert list(checks) == ["writable", "free space", "direct I/O", "file system"]
    assert checks["writable"].status == "ok"
    assert checks["free space"].status == "ok"
    assert "1.0 MB more can be stored" in checks["free space"].summary
    # It looked, and left nothing behind.
    assert list((tmp_path / "kv").iterdir()) == []


def test_a_target_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    checks = tier_checks(tmp_path, f"path: {tmp_path}/a/b/kv, min_free_gb: 0")
    assert checks["writable"].status == "ok"
    assert f"it can be made in {tmp_path}" in checks["writable"].summary
    assert [path.name for path in tmp_path.iterdir()] == ["t.yaml"]


def test_a_target_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (f"{tmp_path}/file/kv", "/proc/kv"):
        checks = tier_checks(tmp_path, f"path: {path}")
        assert list(checks) == ["writable"]
        assert checks["writable"].status == "fail"
        assert path in checks["writable"].summary
        assert checks["writable"].remedy


def test_a_target_without_permission(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    root = os.geteuid() == 0
    loaded = context(f"storage: {{fallback_local: {{path: {closed}/kv}}}}\n", tmp_path / "x.yaml")
    if root:
        # Root may write everywhere.
        os.seteuid(65534)
    try:
        (check,) = check_targets(loaded)
    finally:
        if root:
            os.seteuid(0)
    assert check.status == "fail"
    assert "Permission denied" in check.summary


def test_a_disk_that_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.pread", lambda fd, count, offset: b"\0" * count)
    checks = tier_checks(tmp_path, f"path: {tmp_path}/kv")
    assert checks["writable"].status == "fail"
    assert "cannot be used (it does not return what was written)" in checks["writable"].summary


def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv/photo.jpg").write_bytes(b"x")
    check = tier_checks(tmp_path, f"path: {tmp_path}/kv")["writable"]
    assert check.status == "fail"
    assert "photo.jpg" in check.summary


def test_free_space_against_reserve_and_capacity(tmp_path: Path) -> None:
    path = f"path: {tmp_path}/kv"
    check = tier_checks(tmp_path, f"{path}, min_free_gb: 900T")["free space"]
    assert (check.status, "nothing more is stored" in check.summary) == ("fail", True)
    check = tier_checks(tmp_path, f"{path}, min_free_gb: 0, capacity_gb: 900T")["free space"]
    assert (check.status, "it can only grow to" in check.summary) == ("warn", True)
    check = tier_checks(tmp_path, f"{path}, min_free_gb: 0")["free space"]
    assert (check.status, "more can be stored" in check.summary) == ("ok", True)


def test_a_full_store(tmp_path: Path) -> None:
    directory = tmp_path / "kv" / ("a" * 32)
    directory.mkdir(parents=True)
    (tmp_path / "kv/lifeboat-cache.json").write_text('{"format": 1}')
    (directory / f"{'b' * 32}.00000000.segment").write_bytes(b"x" * 1_000_000)
    check = tier_checks(tmp_path, f"path: {tmp_path}/kv, min_free_gb: 0, capacity_gb: 1M")[
        "free space"
    ]
    assert check.status == "warn"
    assert "purge" in check.remedy


@pytest.mark.parametrize(
    ("setting", "works", "status"),
    [
        ("auto", True, "ok"),
        ("on", True, "ok"),
        ("auto", False, "warn"),
        ("on", False, "fail"),
        ("off", False, "skip"),
    ],
)
def test_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, works: bool, status: str
) -> None:
    def supports(directory: Path, wanted: str) -> bool:
        if wanted == "on" and not works:
            raise TargetError(22, "no")
        return works

    monkeypatch.setattr(doctor_targets, "supports_direct", supports)
    check = tier_checks(tmp_path, f"path: {tmp_path}/kv, direct_io: {setting}")["direct I/O"]
    assert check.status == status
    assert bool(check.remedy) == (status in ("warn", "fail"))


def test_direct_io_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Mount(tmp_path, "tmpfs", "tmpfs")
    monkeypatch.setattr(doctor_targets, "mount_of", lambda path: memory)
    check = tier_checks(tmp_path, f"path: {tmp_path}/kv, direct_io: auto")["direct I/O"]
    assert check.status == "skip"
    assert "tmpfs" in check.summary


@pytest.mark.parametrize(
    ("file_system", "status", "word"),
    [
        ("ext4", "ok", "ext4"),
        ("overlay", "warn", "lost with the container"),
        ("tmpfs", "warn", "next boot"),
        ("nfs4", "warn", "network"),
        ("fuse.unheard-of", "warn", "user-space"),
    ],
)
def test_what_the_file_system_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system: str, status: str, word: str
) -> None:
    monkeypatch.setattr(
        doctor_targets, "mount_of", lambda path: Mount(Path("/m"), file_system, "dev")
    )
    check = tier_checks(tmp_path, f"path: {tmp_path}/kv")["file system"]
    assert check.status == status
    assert word in check.summary
    assert bool(check.remedy) == (status == "warn")


def test_a_target_on_memory_is_noticed() -> None:
    mount = mount_of(Path("/dev/shm"))
    if mount is None or mount.type != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    tier = Tier.model_validate(
        {"name": "t", "type": "filesystem", "path": "/dev/shm/lifeboat-test", "min_free_gb": 0}
    )
    checks = doctor_targets._patiently(tier)
    assert [check.status for check in checks if "file system" in check.name] == ["warn"]


def test_a_mount_that_hangs_is_reported(tmp_path: Path) -> None:
    tier = Tier.model_validate({"name": "t", "type": "filesystem", "path": str(tmp_path)})

    def hang(name: str, tier: Tier) -> list[Check]:
        threading.Event().wait()
        return []

    (check,) = doctor_targets._patiently(tier, hang, patience_s=0.5)
    assert check.status == "fail"
    assert "has not answered" in check.summary


def test_a_check_that_raises_is_a_failed_check(tmp_path: Path) -> None:
    tier = Tier.model_validate({"name": "t", "type": "filesystem", "path": str(tmp_path)})

    def broken(name: str, tier: Tier) -> list[Check]:
        raise OSError(5, "Input/output error")

    (check,) = doctor_targets._patiently(tier, broken)
    assert check.status == "fail"
    assert "Input/output error" in check.summary


# --- mounts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/var/x", ("/", "ext4", "/dev/root")),
        ("/dev/shm/x", ("/dev/shm", "tmpfs", "tmpfs")),
        ("/dev/shmx", ("/", "ext4", "/dev/root")),
        # The later mount covers the earlier one at the same place.
        ("/data/x", ("/data", "nfs4", "server:/export")),
        ("/data/my disk/x", ("/data/my disk", "xfs", "/dev/nvme0n1")),
        ("/database", ("/database", "btrfs", "/dev/sdb")),
    ],
)
def test_the_mount_of_a_path(path: str, expected: tuple[str, str, str]) -> None:
    point, kind, source = expected
    found = mount_of(Path(path), MOUNTINFO)
    assert found is not None
    assert found == Mount(Path(point), kind, source, found.options)


def test_no_mount_is_found_in_nothing() -> None:
    assert mount_of(Path("/x"), "") is None


def test_kinds_of_file_systems() -> None:
    kinds = {
        name: kind_of(name)
        for name in ("ext4", "xfs", "fuseblk", "overlay", "ramfs", "cifs", "fuse.sshfs", "fuse")
    }
    assert kinds == {
        "ext4": "local",
        "xfs": "local",
        "fuseblk": "local",
        "overlay": "container",
        "ramfs": "memory",
        "cifs": "network",
        "fuse.sshfs": "network",
        "fuse": "fuse",
    }


def test_this_machine_has_a_root() -> None:
    mount = mount_of(Path("/"))
    assert mount is not None
    assert mount.point == Path("/")


# --- installation ----------------------------------------------------------------------------


def test_versions_name_what_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "lifeboatcache_example-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: lifeboatcache-example\nVersion: 9.9\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    check = check_versions()
    assert check.status == "ok"
    assert "lifeboatcache-example 9.9" in check.details


def test_metadata_of_another_core_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "lifeboatcache_core-0.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: lifeboatcache-core\nVersion: 0.0.1\n"
    )
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    check = check_versions()
    assert check.status == "warn"
    assert "0.0.1" in check.summary


def test_an_invalid_configuration(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home.mkdir()
    (home / "lifeboat.yaml").write_text("storge: {}\nengine: {io_workers: 0}\n")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "fail  configuration" in out
    assert "Did you mean 'storage'?" in out
    assert "skip  targets" in out
    assert "skip  home directory" in out


@pytest.mark.parametrize(
    "text", ["security: {namespace_salt: hush}\n", "dashboard: {auth_token: hush}\n"]
)
def test_a_secret_that_others_can_read(tmp_path: Path, text: str) -> None:
    file = tmp_path / "salted.yaml"
    found = context(text, file)
    file.chmod(0o644)
    _, private = check_config(found)
    assert (private.status, private.remedy) == ("warn", f"chmod 600 {file}")
    file.chmod(0o600)
    _, private = check_config(found)
    assert private.status == "ok"
    # Without a secret there is nothing to keep private.
    assert len(list(check_config(context("engine: {}", file)))) == 1


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_the_integrity_key(tmp_path: Path, mode: int) -> None:
    key = tmp_path / "integrity.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(mode)
    config = tmp_path / "x.yaml"
    loaded = context(f"security: {{integrity_key: {key}}}\n", config)
    _, check, *_ = check_config(loaded)
    assert check.name == "configuration: integrity key"
    if mode == 0o600:
        assert check.status == "ok"
        assert str(key) in check.summary
    else:
        assert (check.status, check.remedy) == ("fail", f"chmod 600 {key}")
    key.unlink()
    _, check, *_ = check_config(loaded)
    assert check.status == "fail"
    assert "cannot be read" in check.summary
    assert check.remedy not in check.summary
    assert check.summary not in check.remedy


def test_kernels(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_kernels(context()).status == "ok"
    assert "not compiled" in check_kernels(context()).summary
    with cache.new_set(cache.directory(home)):
        pass
    assert check_kernels(context()).summary.startswith("compiled")
    (cache.directory(home) / cache.MARKER).write_text("{}")
    check = check_kernels(context())
    assert (check.status, check.remedy.split(".")[0]) == ("warn", "Remove it")
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    check = check_kernels(context())
    assert check.status == "warn"
    assert check.remedy.startswith("Unset it")


def test_the_home_directory(home: Path) -> None:
    found = context()
    assert check_home(found).status == "ok"
    home.mkdir()
    home.chmod(0o755)
    check = check_home(found)
    assert (check.status, check.remedy) == ("warn", f"chmod 700 {home}")
    home.chmod(0o700)
    assert check_home(found).status == "ok"
    if os.geteuid() == 0:
        os.chown(home, 12345, -1)
        assert "belongs to user 12345" in check_home(found).summary
    home.rmdir()
    home.write_text("")
    assert "is not a directory" in check_home(found).summary


# --- running, and checks of other distributions ----------------------------------------------


PLUGIN = """
from lifeboat_cache.doctor import Check

def good(context):
    yield Check("good", "ok", f"home {context.loaded.home.name}")

def breaks(context):
    yield Check("before", "warn", "w", "r")
    1 / 0

def strange(context):
    return ["no check"]
"""


def test_checks_of_other_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "extra_checks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-checks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lifeboat_cache.doctor.test]\n"
        "a = extra_checks_module:good\nb = extra_checks_module:breaks\n"
        "c = extra_checks_module:strange\nd = no_such_module:checks\n"
    )
    (tmp_path / "extra_checks_module.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    checks = run_checks(context())
    names = [check.name for check in checks]
    assert names[0] == "versions"
    assert names[-5:] == ["good", "before", *["checks of extra-checks"] * 3]
    assert [check.status for check in checks[-5:]] == ["ok", "warn", "fail", "fail", "fail"]
    assert checks[-5].summary == "home home"
    assert "ZeroDivisionError" in checks[-3].summary
    assert "str instead of a Check" in checks[-2].summary
    assert "no_such_module" in checks[-1].summary
    assert all(check.remedy for check in checks if check.status in ("warn", "fail"))


class Told:
    """Stands in for the checks of a machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *checks: Check) -> None:
        monkeypatch.setattr("lifeboat_cache.cli.doctor_command.run_checks", self.run)
        self.checks = list(checks)

    def run(self, context: DoctorContext) -> list[Check]:
        return self.checks


def test_output_and_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(monkeypatch, Check("a", "ok", "fine", details=("quiet",)))
    told.checks.append(Check("bb", "warn", "odd\nsecond", "do this", ("loud",)))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok    a   fine",
        "warn  bb  odd",
        "          second",
        "          loud",
        "          -> do this",
        "",
        "1 ok, 1 to look at, 0 failed, 0 skipped",
    ]
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == "warn"
    assert document["checks"][0] == {
        "name": "a",
        "status": "ok",
        "summary": "fine",
        "remedy": "",
        "details": ["quiet"],
        "fixable": False,
    }
    told.checks.append(Check("c", "fail", "bad", "do that"))
    assert main(["doctor"]) == 1
    assert main(["doctor", "--json"]) == 1


def test_fix_asks_and_applies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    applied: list[str] = []

    def apply() -> tuple[str, ...]:
        applied.append("x")
        return ("removed x",)

    told = Told(monkeypatch, Check("a", "warn", "w", "r", fix=Fix("Remove x?", apply)))
    assert main(["doctor"]) == 0
    assert applied == []
    # Nobody to ask.
    assert main(["doctor", "--fix"]) == 2
    assert main(["doctor", "--fix", "--json"]) == 2
    assert applied == []
    assert main(["doctor", "--fix", "--yes"]) == 0
    assert applied == ["x"]
    capsys.readouterr()
    assert main(["doctor", "--fix", "--yes", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fixed"] == ["removed x"]
    assert document["checks"][0]["fixable"]
    told.checks = [Check("a", "ok", "fine")]
    assert main(["doctor", "--fix"]) == 0
    assert "nothing that --fix could do" in capsys.readouterr().out


def test_the_whole_doctor_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("storage: {fallback_local: {min_free_gb: 0, capacity_gb: 1M}}\n")
    assert main(["--config", str(file), "doctor", "--json"]) == 0
    checks: list[Mapping[str, object]] = json.loads(capsys.readouterr().out)["checks"]
    names = [check["name"] for check in checks]
    assert names == [
        "versions",
        "adapters",
        "configuration",
        "home directory",
        "kernels",
        "target fallback_local: writable",
        "target fallback_local: free space",
        "target fallback_local: direct I/O",
        "target fallback_local: file system",
        "ports",
        "shared memory",
    ]


def test_every_check_is_in_the_troubleshooting_page() -> None:
    page = (Path(__file__).parents[3] / "docs/troubleshooting.md").read_text(encoding="utf-8")
    for name in (
        "adapters",
        "configuration: private",
        "configuration: integrity key",
        "home directory",
        "kernels",
        "writable",
        "free space",
        "direct I/O",
        "file system",
        "ports",
        "shared memory",
    ):
        assert f"doctor: `{name}`" in page


@pytest.mark.parametrize(
    ("entries", "said"), [((), True), (("dashboard",), True), (("dashboard", "vllm"), False)]
)
def test_an_environment_without_an_adapter_is_said(entries: tuple[str, ...], said: bool) -> None:
    checks = list(check_adapters(entries))
    assert bool(checks) is said
    for check in checks:
        assert check.status == "warn"
        assert "lifeboatcache-vllm" in check.remedy
