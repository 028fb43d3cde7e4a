# ruff: noqa: E501 - the texts are as the kernel prints them
"""Mounts as the kernel shows them, against what was asked for."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Literal

import pytest

from lifeboat_cache.config.schema import Tier
from lifeboat_cache.doctor import targets as doctor_targets
from lifeboat_cache.doctor.check import Check
from lifeboat_cache.errors import TargetError
from lifeboat_cache.targets import filesystem, nfs_mount
from lifeboat_cache.targets.filesystem import FilesystemTarget
from lifeboat_cache.targets.mounts import Mount
from lifeboat_cache.targets.nfs_mount import (
    NfsProtocol,
    NfsStats,
    examine,
    find_mount,
    nfs_stats,
    require_mounted,
)

#: As kernels 5.15 to 6.8 print them, with other names.
_V3 = (
    "rw,vers=3,rsize=1048576,wsize=1048576,namlen=255,hard,proto=tcp,timeo=600,retrans=2,sec=sys,"
    "mountaddr=10.0.0.1,mountvers=3,mountproto=udp,local_lock=none,addr=10.0.0.1"
)
_V41 = (
    "rw,vers=4.1,rsize=1048576,wsize=1048576,namlen=255,hard,proto=tcp,nconnect=8,timeo=600,"
    "retrans=2,sec=sys,clientaddr=10.0.0.9,local_lock=none,addr=10.0.0.1"
)
_RDMA = _V41.replace("proto=tcp,nconnect=8", "proto=rdma,port=20049")
MOUNTINFO = rf"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
80 22 0:50 / /mnt/v3 rw,relatime shared:40 - nfs filer:/vol/kv {_V3}
81 22 0:51 / /mnt/v41 rw,noatime shared:41 - nfs4 filer:/kv {_V41}
82 22 0:52 / /mnt/rdma rw,relatime shared:42 - nfs4 filer:/kv {_RDMA}
83 22 0:53 / /mnt/slow rw,relatime shared:43 - nfs4 filer:/kv rw,sync,vers=4.2,rsize=65536,wsize=1048576,soft,noac,proto=tcp,timeo=100,retrans=3,addr=10.0.0.1
84 22 0:54 / /mnt/ro ro,relatime shared:44 - nfs4 filer:/kv ro,vers=4.2,rsize=1048576,wsize=1048576,hard,proto=tcp6,addr=fe80::1
85 22 0:55 / /mnt/auto rw,relatime shared:45 - autofs systemd-1 rw,fd=60,pgrp=1,timeout=0,direct
86 22 0:56 / /mnt/my\040kv rw,relatime shared:46 - nfs4 filer:/kv {_V41}
87 22 0:57 / /mnt/fuse rw,relatime shared:47 - fuse.sshfs host:/kv rw
"""
MOUNTSTATS = r"""
device sysfs mounted on /sys with fstype sysfs
device filer:/vol/kv mounted on /mnt/v3 with fstype nfs statvers=1.1
	opts:	rw,vers=3,rsize=1048576,wsize=1048576,hard,proto=tcp,timeo=600,retrans=2,sec=sys
	age:	1200
	caps:	caps=0x3fcf,wtmult=512,dtsize=32768,bsize=0,namlen=255
	sec:	flavor=1,pseudoflavor=1
	RPC iostats version: 1.1  p/v: 100003/3 (nfs)
	xprt:	tcp 875 1 2 0 0 10 10 0 10 0 2 0 0
device filer:/kv mounted on /mnt/v41 with fstype nfs4 statvers=1.1
	opts:	rw,vers=4.1,rsize=1048576,wsize=1048576,hard,proto=tcp,nconnect=8
	impl_id:	name='NetApp Release 9.14.1P2: Thu Feb 1 01:02:03 UTC 2024',domain='netapp.com',date='0,0'
	caps:	caps=0xffffbfff,wtmult=512,dtsize=65536,bsize=0,namlen=255
	nfsv4:	bm0=0xfdffbfff,bm1=0x40f9be3e,bm2=0x803,acl=0x3,sessions,pnfs=LAYOUT_NFSV4_1_FILES,lease_time=30,lease_expired=0
	sec:	flavor=1,pseudoflavor=1
	RPC iostats version: 1.1  p/v: 100003/4 (nfs)
	xprt:	tcp 0 0 2 0 0 99 99 0 99 0 3 0 0
	xprt:	tcp 0 0 2 0 0 98 98 0 98 0 3 0 0
device filer:/kv mounted on /mnt/rdma with fstype nfs4 statvers=1.1
	impl_id:	name='',domain='',date='0,0'
	nfsv4:	bm0=0xfdffafff,bm1=0xf9be3e,bm2=0x60800,acl=0x0,sessions,pnfs=not configured,lease_time=90,lease_expired=0
	xprt:	rdma 0 0 1 0 24 3 3 0 3 0 0 0 0 0 0 0 0 0 0 0 0 0 0 11 0 0 0
device filer:/kv mounted on /mnt/my\040kv with fstype nfs4 statvers=1.1
	nfsv4:	bm0=0x1,sessions,pnfs=LAYOUT_FLEX_FILES
"""


def found(point: str) -> Mount:
    mount = find_mount(Path(point), MOUNTINFO)
    assert mount is not None
    return mount


def said(
    point: str, protocol: NfsProtocol | None = None, kind: Literal["nfs", "ontap"] = "ontap"
) -> list[str]:
    """What is wrong with a mount, as people read it."""
    findings = examine(kind, protocol, found(point), nfs_stats(Path(point), MOUNTSTATS))
    return [f"{one.level}: {one.text}: {one.remedy}" for one in findings if one.level != "note"]


def test_what_the_tables_say() -> None:
    assert found("/mnt/v3").options["vers"] == "3"
    assert found("/mnt/v41").options["nconnect"] == "8"
    assert "noatime" in found("/mnt/v41").options
    assert find_mount(Path("/mnt/other"), MOUNTINFO) is None
    assert find_mount(Path("/mnt/auto"), MOUNTINFO) is None, "it only waits for somebody"
    stats = nfs_stats(Path("/mnt/v41"), MOUNTSTATS)
    assert stats.layout == "LAYOUT_NFSV4_1_FILES"
    assert stats.server.endswith("netapp.com")
    assert stats.transports == ("tcp", "tcp")
    assert nfs_stats(Path("/mnt/v3"), MOUNTSTATS) == NfsStats(None, "", ("tcp",))
    assert nfs_stats(Path("/mnt/rdma"), MOUNTSTATS) == NfsStats("", "", ("rdma",))
    assert nfs_stats(Path("/mnt/my kv"), MOUNTSTATS).layout == "LAYOUT_FLEX_FILES"
    assert nfs_stats(Path("/mnt/none"), MOUNTSTATS) == NfsStats()


@pytest.mark.parametrize(
    ("point", "protocol"),
    [
        ("/mnt/v3", None),
        ("/mnt/v3", "nfs"),
        ("/mnt/v41", "nfs"),
        ("/mnt/v41", "pnfs"),
        ("/mnt/my kv", "pnfs"),
        ("/mnt/rdma", "nfs"),
    ],
)
def test_what_is_as_it_should_be(point: str, protocol: NfsProtocol | None) -> None:
    assert said(point, protocol) == []


@pytest.mark.parametrize(
    ("point", "protocol", "expected"),
    [
        ("/mnt/v3", "pnfs", ["vers=3,proto=tcp; pnfs was asked for, which needs NFS 4.1"]),
        (
            "/mnt/v3",
            "pnfs_rdma",
            ["pnfs_rdma was asked for, which needs NFS 4.1", "-o proto=rdma,port=20049"],
        ),
        ("/mnt/v41", "pnfs_rdma", ["vers=4.1,proto=tcp; pnfs_rdma was asked for: Mount it with"]),
        ("/mnt/rdma", "pnfs_rdma", ["not as pNFS: the server offers no layouts: On ONTAP"]),
        (
            "/mnt/slow",
            "nfs",
            [
                "is mounted with noac: every look at a file asks the server",
                "is mounted with sync",
                "moves little at a time (rsize=65536)",
            ],
        ),
        ("/mnt/ro", "nfs", ["is mounted read-only: Mount it writable"]),
        ("/mnt/fuse", "nfs", ["/mnt/fuse is a mount of fuse.sshfs, not of NFS"]),
    ],
)
def test_what_is_not_is_said_with_its_remedy(
    point: str, protocol: NfsProtocol, expected: list[str]
) -> None:
    texts = said(point, protocol)
    assert len(texts) == len(expected), texts
    for text, part in zip(texts, expected, strict=True):
        assert part in text
        assert text.endswith(".") or "mount -o remount" in text or "tcp-max-xfer-size" in text


def test_remedies_fit_the_server() -> None:
    (ontap,) = said("/mnt/v3", "pnfs", "ontap")
    assert "vserver nfs modify -v4.1 enabled -v4.1-pnfs enabled" in ontap
    (other,) = said("/mnt/v3", "pnfs", "nfs")
    assert "vserver" not in other


def test_notes_say_what_to_expect() -> None:
    findings = examine("nfs", None, found("/mnt/slow"), NfsStats())
    notes = " ".join(one.text for one in findings if one.level == "note")
    assert (
        "soft mount: while the server is away, blocks fail after timeo=100 and retrans=3" in notes
    )
    assert "one connection" in notes
    hard = examine("ontap", None, found("/mnt/v3"), NfsStats("", "Linux 6.1", ("tcp",)))
    notes = " ".join(one.text for one in hard if one.level == "note")
    assert "hard mount" in notes
    assert "calls itself 'Linux 6.1', not NetApp" in notes


# --- a mount that is missing -----------------------------------------------------------------


def test_nothing_is_written_beneath_a_mount_that_is_missing(tmp_path: Path) -> None:
    point = tmp_path / "mnt"
    point.mkdir()
    target = FilesystemTarget(point / "kv", kind="nfs", mount=point)
    with pytest.raises(TargetError, match=f"nothing is mounted at {point}: run: mount") as caught:
        target.probe()
    assert caught.value.errno == errno.ENODEV
    assert list(point.iterdir()) == []


def test_a_mount_is_found_by_links_too(tmp_path: Path) -> None:
    require_mounted(Path("/proc"))
    link = tmp_path / "link"
    link.symlink_to("/proc")
    require_mounted(link)
    with pytest.raises(TargetError, match="is not below /proc: set the tier's mount"):
        FilesystemTarget(tmp_path / "kv", mount=Path("/proc")).probe()


def test_a_mount_that_goes_ends_new_writers(
    root: Path, namespace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = Mount(root.parent, "nfs4", "filer:/kv", {})
    there = [mount]
    monkeypatch.setattr(nfs_mount, "mounts", lambda _=None: there)
    target = FilesystemTarget(root, kind="nfs", mount=root.parent)
    target.probe()
    target.writer(namespace).close()
    there.clear()
    with pytest.raises(TargetError, match="nothing is mounted"):
        target.writer(namespace)


@pytest.mark.parametrize("user", [0, 1000])
def test_a_refused_write_names_the_squash(
    root: Path, user: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = FilesystemTarget(root, kind="nfs")
    target.probe()

    def squashed(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(filesystem.os, "pwrite", squashed)  # type: ignore[attr-defined]
    with pytest.raises(TargetError) as caught:
        target.probe()
    text = str(caught.value)
    assert ("root_squash" in text) == (user == 0)
    assert "file_mode 0660 and group" in text


# --- the doctor ------------------------------------------------------------------------------


def mount_checks(tmp_path: Path, **keys: object) -> list[Check]:
    values = {"name": "t", "type": "nfs", "path": str(tmp_path / "mnt/kv"), "min_free_gb": 0.0}
    tier = Tier.model_validate({**values, **keys})
    return [c for c in doctor_targets._check_tier("t", tier) if c.name == "t: mount"]


def test_the_doctor_says_what_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = tmp_path / "mnt"
    point.mkdir()
    (check,) = mount_checks(tmp_path, mount=str(point))
    assert check.status == "fail"
    assert "nothing is mounted at" in check.summary
    options = found("/mnt/v41").options
    monkeypatch.setattr(
        nfs_mount, "mounts", lambda _=None: [Mount(point, "nfs4", "filer:/kv", options)]
    )
    (check,) = mount_checks(tmp_path, mount=str(point), protocol="nfs")
    assert check.status == "ok"
    assert any("hard mount" in line for line in check.details)
    (check,) = mount_checks(tmp_path, mount=str(point), protocol="pnfs_rdma", type="ontap")
    assert check.status == "warn"
    assert "proto=rdma" in check.remedy
    assert mount_checks(tmp_path, type="filesystem") == []
