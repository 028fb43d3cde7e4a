"""A FUSE filesystem that passes through to a directory and fails on demand.

``fuse_server.py BACKING MOUNT CONTROL_FD``, as root. Speaks the kernel's protocol itself,
because that needs no library and no compiler. One thread: a request that hangs is
one that is not answered yet. On the control socket, lines of JSON:

``{"rules": [...]}``
    Replace the rules. A rule is ``{"op": "read", "match": REGEX, "do": WHAT, ...}``,
    where WHAT is ``error`` (with ``errno``), ``hang``, ``short`` (half is moved), ``flip``
    (one bit of what is read is wrong), ``late`` (it is done, then ``errno`` is reported),
    ``delay`` (it is done ``seconds`` later, others go on), ``torn`` (the second half of what is
    read is zeros, as seen by a client to which it has not come yet), ``old`` (``read``,
    ``getattr`` and ``lookup`` see the first ``size`` bytes of the file only) or ``hide``
    (``readdir``: names that match ``match`` are not listed; ``lookup``: there is no such file);
    ``skip`` requests pass before it applies, and it applies ``times`` times (-1 = for ever).
    ``bytes`` is a range: it applies to reads and writes of those bytes of the file.
``{"release": true, "errno": 0}``
    Answer what hangs: do it, or fail it with that number.
``{}``
    Only ask.

Each is answered with how often each rule has applied, how many requests hang, and which
threads wait for those.
Files are opened without the page cache, so that every call of a process arrives here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import select
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<4Q2I")
_OPENED = struct.Struct("<QII")
_IO = struct.Struct("<QQIIQII")  # fuse_read_in and fuse_write_in
_SETATTR = struct.Struct("<IIQQQQQQIIIIIIII")
_STATFS = struct.Struct("<5Q4I24x")
_INIT_OUT = struct.Struct("<4I2H2I2H8I")

_MAX_PAGES = 256
_MAX_WRITE = _MAX_PAGES * 4096
_BIG_WRITES, _MAX_PAGES_FLAG, _ASYNC_READ = 1 << 5, 1 << 22, 1
_DIRECT_IO = 1  # FOPEN_DIRECT_IO: no page cache
_SIZE, _MODE, _OWNER, _GROUP, _MTIME = 8, 1, 2, 4, 32

_OPS = {
    1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 9: "mkdir", 10: "unlink",
    11: "rmdir", 12: "rename", 14: "open", 15: "read", 16: "write", 17: "statfs",
    18: "release", 20: "fsync", 25: "flush", 26: "init", 27: "opendir", 28: "readdir",
    29: "release", 30: "fsync", 34: "access", 35: "create", 36: "interrupt", 38: "destroy",
    42: "batch_forget", 43: "fallocate", 45: "rename2",
}  # fmt: skip
_SILENT = ("forget", "batch_forget", "interrupt")


class _Node:
    def __init__(self, path: str) -> None:
        self.path: str | None = path
        self.fds: list[int] = []


class Server:
    """Answers the kernel's requests on ``fuse`` and the test's on ``control``."""

    def __init__(self, backing: str, fuse: int, control: socket.socket) -> None:
        self.fuse = fuse
        self.control = control
        self.nodes: dict[int, _Node] = {1: _Node(backing)}
        self.ids: dict[str, int] = {backing: 1}
        self.next_id = 2
        self.files: dict[int, tuple[int, _Node]] = {}
        self.listings: dict[int, list[bytes]] = {}
        self.next_listing = 1 << 20
        self.rules: list[dict[str, Any]] = []
        self.hit: list[int] = []
        self.held: list[tuple[int, int, Callable[[], bytes]]] = []
        self.later: list[tuple[float, int, Callable[[], bytes]]] = []

    def run(self) -> None:
        """Serve until the filesystem is unmounted and the last file is closed."""
        lines = b""
        sources: list[Any] = [self.fuse, self.control]
        while True:
            now = time.monotonic()
            due = [one for one in self.later if one[0] <= now]
            self.later = [one for one in self.later if one[0] > now]
            for _, unique, work in due:
                self.answer(unique, work)
            wait = min((one[0] - now for one in self.later), default=None)
            ready, _, _ = select.select(sources, [], [], wait)
            if self.control in ready:
                data = self.control.recv(65536)
                if not data:  # the test has ended
                    sources.remove(self.control)
                    self.command({"rules": [], "release": True})
                    continue
                *whole, lines = (lines + data).split(b"\n")
                for line in whole:
                    self.command(json.loads(line))
            if self.fuse in ready:
                try:
                    data = os.read(self.fuse, _MAX_WRITE + 65536)
                except OSError as exc:
                    if exc.errno == errno.ENODEV:  # unmounted
                        return
                    if exc.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                        continue
                    raise
                self.request(data)

    def command(self, command: dict[str, Any]) -> None:
        if "rules" in command:
            self.rules = command["rules"]
            self.hit = [0] * len(self.rules)
        if command.get("release"):
            held, self.held = self.held, []
            for unique, _, work in held:
                if command.get("errno"):
                    self.reply(unique, -command["errno"])
                else:
                    self.answer(unique, work)
        answer = {
            "hit": self.hit,
            "hanging": len(self.held),
            "threads": [one[1] for one in self.held],
        }
        with contextlib.suppress(OSError):
            self.control.sendall(json.dumps(answer).encode() + b"\n")

    def reply(self, unique: int, error: int, body: bytes = b"") -> None:
        with contextlib.suppress(OSError):  # the caller was killed
            os.write(self.fuse, _OUT.pack(_OUT.size + len(body), error, unique) + body)

    def answer(self, unique: int, work: Callable[[], bytes]) -> None:
        try:
            body = work()
        except OSError as exc:
            self.reply(unique, -(exc.errno or errno.EIO))
        else:
            self.reply(unique, 0, body)

    def request(self, data: bytes) -> None:
        _, opcode, unique, node, _, _, thread, *_ = _IN.unpack_from(data)
        body = data[_IN.size :]
        op = _OPS.get(opcode)
        if op in _SILENT:
            return
        if op is None:
            self.reply(unique, -errno.ENOSYS)
            return
        rule = self.rule(op, node, body)
        if rule is not None and rule["do"] == "error":
            self.reply(unique, -rule["errno"])
            return
        if rule is not None and rule["do"] == "hide" and op == "lookup":
            self.reply(unique, -errno.ENOENT)
            return
        if rule is not None and rule["do"] == "short":
            body = self.shortened(body)
        hidden = rule["match"] if rule is not None and rule["do"] == "hide" else None

        def work() -> bytes:
            if hidden is not None:
                done = self.do_readdir(node, body, hidden)
            else:
                done = getattr(self, "do_" + op)(node, body)
            if rule is not None and rule["do"] == "torn" and done:
                done = done[: len(done) // 2] + bytes(len(done) - len(done) // 2)
            if rule is not None and rule["do"] == "old":
                done = self.as_of_old(op, body, done, rule["size"])
            if rule is not None and rule["do"] == "flip" and done:
                at = len(done) // 2
                done = done[:at] + bytes([done[at] ^ 4]) + done[at + 1 :]
            if rule is not None and rule["do"] == "late":
                raise OSError(rule["errno"], "reported too late")
            return done

        if rule is not None and rule["do"] == "hang":
            self.held.append((unique, thread, work))
        elif rule is not None and rule["do"] == "delay":
            self.later.append((time.monotonic() + rule["seconds"], unique, work))
        else:
            self.answer(unique, work)

    def rule(self, op: str, node: int, body: bytes) -> dict[str, Any] | None:
        """The first rule that applies to a request."""
        name = self.name(op, node, body)
        for number, rule in enumerate(self.rules):
            listing = op == "readdir" and rule["do"] == "hide"
            if rule["op"] != op or not (listing or re.search(rule.get("match", ""), name)):
                continue
            if "bytes" in rule:
                _, offset, size, *_ = _IO.unpack_from(body)
                if offset >= rule["bytes"][1] or offset + size <= rule["bytes"][0]:
                    continue
            if rule.get("skip", 0) > 0:
                rule["skip"] -= 1
                continue
            if rule.get("times", -1) == 0:
                continue
            rule["times"] = rule.get("times", -1) - 1
            self.hit[number] += 1
            return rule
        return None

    def name(self, op: str, node: int, body: bytes) -> str:
        if op in ("read", "write", "fsync", "flush"):
            found = self.files.get(int.from_bytes(body[:8], "little"))
            return (found[1].path or "") if found else ""
        base = self.nodes[node].path or "" if node in self.nodes else ""
        start = {"lookup": 0, "mkdir": 8, "create": 16, "unlink": 0, "rmdir": 0, "rename": 8}
        if op in start:
            return base + "/" + body[start[op] :].split(b"\0")[0].decode()
        return base

    @staticmethod
    def as_of_old(op: str, body: bytes, done: bytes, size: int) -> bytes:
        """What a client that has not seen a file grow is told of it."""
        if op == "read":
            _, offset, *_ = _IO.unpack_from(body)
            return done[: max(0, size - offset)]
        at = _ENTRY.size + 8 if op == "lookup" else 16 + 8
        (real,) = struct.unpack_from("<Q", done, at)
        return done[:at] + struct.pack("<Q", min(real, size)) + done[at + 8 :]

    @staticmethod
    def shortened(body: bytes) -> bytes:
        fh, offset, size, *rest = _IO.unpack_from(body)
        half = max(1, size // 2 // 4096 * 4096) if size >= 8192 else max(1, size // 2)
        return _IO.pack(fh, offset, half, *rest) + body[_IO.size : _IO.size + half]

    # Nodes --------------------------------------------------------------------

    def path(self, node: int) -> str:
        path = self.nodes[node].path
        if path is None:
            raise OSError(errno.ESTALE, "deleted")
        return path

    def child(self, node: int, name: bytes) -> str:
        return self.path(node) + "/" + name.rstrip(b"\0").decode()

    def node_of(self, path: str) -> int:
        if path not in self.ids:
            self.ids[path] = self.next_id
            self.nodes[self.next_id] = _Node(path)
            self.next_id += 1
        return self.ids[path]

    def forget_path(self, path: str) -> None:
        node = self.ids.pop(path, None)
        if node is not None:
            self.nodes[node].path = None

    def stat(self, node: int) -> os.stat_result:
        known = self.nodes[node]
        return os.lstat(known.path) if known.path is not None else os.fstat(known.fds[-1])

    @staticmethod
    def attributes(found: os.stat_result) -> bytes:
        times = (found.st_atime, found.st_mtime, found.st_ctime)
        return _ATTR.pack(
            found.st_ino, found.st_size, found.st_blocks, *(max(0, int(t)) for t in times),
            *(int(t % 1 * 1e9) for t in times), found.st_mode, found.st_nlink, found.st_uid,
            found.st_gid, 0, 4096, 0,
        )  # fmt: skip

    def entry(self, path: str) -> bytes:
        found = os.lstat(path)
        return _ENTRY.pack(self.node_of(path), 0, 0, 0, 0, 0) + self.attributes(found)

    # Requests -----------------------------------------------------------------

    def do_init(self, node: int, body: bytes) -> bytes:
        major, minor, readahead, flags = struct.unpack_from("<4I", body)
        flags &= _BIG_WRITES | _MAX_PAGES_FLAG | _ASYNC_READ
        return _INIT_OUT.pack(
            major, min(minor, 31), readahead, flags, 64, 48, _MAX_WRITE, 1, _MAX_PAGES, 0, *[0] * 8
        )

    def do_lookup(self, node: int, body: bytes) -> bytes:
        return self.entry(self.child(node, body))

    def do_getattr(self, node: int, body: bytes) -> bytes:
        return bytes(16) + self.attributes(self.stat(node))

    def do_setattr(self, node: int, body: bytes) -> bytes:
        fields = _SETATTR.unpack_from(body)
        valid, size, mtime, mode = fields[0], fields[3], fields[6], fields[11]
        owner, group = fields[13], fields[14]
        known = self.nodes[node]
        where: Any = known.path if known.path is not None else known.fds[-1]
        if valid & _SIZE:
            os.truncate(where, size)
        if valid & _MODE:
            os.chmod(where, stat.S_IMODE(mode))
        if valid & (_OWNER | _GROUP):
            os.chown(where, owner if valid & _OWNER else -1, group if valid & _GROUP else -1)
        if valid & _MTIME:
            os.utime(where, (mtime, mtime))
        return self.do_getattr(node, b"")

    def do_mkdir(self, node: int, body: bytes) -> bytes:
        mode, umask = struct.unpack_from("<2I", body)
        path = self.child(node, body[8:])
        os.mkdir(path, mode & ~umask)
        return self.entry(path)

    def do_unlink(self, node: int, body: bytes) -> bytes:
        path = self.child(node, body)
        known = self.nodes.get(self.ids.get(path, 0))
        if known is not None and not known.fds:
            # It may be open in a request under way; fstat of it needs something to ask.
            with contextlib.suppress(OSError):
                known.fds.append(os.open(path, os.O_RDONLY | os.O_NOFOLLOW))
        os.unlink(path)
        self.forget_path(path)
        return b""

    def do_rmdir(self, node: int, body: bytes) -> bytes:
        path = self.child(node, body)
        os.rmdir(path)
        self.forget_path(path)
        return b""

    def do_rename(self, node: int, body: bytes, skip: int = 8) -> bytes:
        (to,) = struct.unpack_from("<Q", body)
        old, new, _ = body[skip:].split(b"\0", 2)
        before, after = self.child(node, old), self.child(to, new)
        os.rename(before, after)
        self.forget_path(after)
        for path in [p for p in self.ids if p == before or p.startswith(before + "/")]:
            number = self.ids.pop(path)
            moved = after + path[len(before) :]
            self.ids[moved] = number
            self.nodes[number].path = moved
        return b""

    def do_rename2(self, node: int, body: bytes) -> bytes:
        if struct.unpack_from("<I", body, 8)[0]:
            raise OSError(errno.EINVAL, "flags")
        return self.do_rename(node, body, 16)

    def opened(self, node: int, fd: int) -> bytes:
        known = self.nodes[node]
        known.fds.append(fd)
        self.files[fd] = (fd, known)
        return _OPENED.pack(fd, _DIRECT_IO, 0)

    def do_open(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0] & ~(os.O_DIRECT | os.O_CREAT | os.O_EXCL)
        return self.opened(node, os.open(self.path(node), flags | os.O_CLOEXEC))

    def do_create(self, node: int, body: bytes) -> bytes:
        flags, mode, umask = struct.unpack_from("<3I", body)
        path = self.child(node, body[16:])
        fd = os.open(path, (flags & ~os.O_DIRECT) | os.O_CREAT | os.O_CLOEXEC, mode & ~umask)
        entry = self.entry(path)
        return entry + self.opened(self.ids[path], fd)

    def do_read(self, node: int, body: bytes) -> bytes:
        fh, offset, size, *_ = _IO.unpack_from(body)
        return os.pread(self.files[fh][0], size, offset)

    def do_write(self, node: int, body: bytes) -> bytes:
        fh, offset, size, *_ = _IO.unpack_from(body)
        done = os.pwrite(self.files[fh][0], body[_IO.size : _IO.size + size], offset)
        return struct.pack("<II", done, 0)

    def do_statfs(self, node: int, body: bytes) -> bytes:
        found = os.statvfs(self.path(1))
        return _STATFS.pack(
            found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree,
            found.f_bsize, found.f_namemax, found.f_frsize, 0,
        )  # fmt: skip

    def do_release(self, node: int, body: bytes) -> bytes:
        (fh,) = struct.unpack_from("<Q", body)
        if fh in self.listings:
            del self.listings[fh]
        elif fh in self.files:
            fd, known = self.files.pop(fh)
            known.fds.remove(fd)
            os.close(fd)
        return b""

    def do_opendir(self, node: int, body: bytes) -> bytes:
        names = [b".", b"..", *map(os.fsencode, os.listdir(self.path(node)))]
        self.next_listing += 1
        self.listings[self.next_listing] = names
        return _OPENED.pack(self.next_listing, 0, 0)

    def do_readdir(self, node: int, body: bytes, hidden: str | None = None) -> bytes:
        fh, offset, size, *_ = _IO.unpack_from(body)
        out = b""
        for at, name in enumerate(self.listings[fh][offset:], start=offset + 1):
            if hidden is not None and re.search(hidden, os.fsdecode(name)):
                continue
            one = struct.pack("<QQII", at, at, len(name), 0) + name
            one += bytes(-len(one) % 8)
            if len(out) + len(one) > size:
                break
            out += one
        return out

    def do_fsync(self, node: int, body: bytes) -> bytes:
        return b""

    do_flush = do_access = do_destroy = do_fsync

    def do_fallocate(self, node: int, body: bytes) -> bytes:
        fh, offset, length, mode = struct.unpack_from("<QQQI", body)
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (ctypes.c_int(self.files[fh][0]), ctypes.c_int(mode))
        if libc.fallocate(*arguments, ctypes.c_long(offset), ctypes.c_long(length)):
            raise OSError(ctypes.get_errno(), "fallocate")
        return b""


def main() -> None:
    """Mount, say so on the control socket, and serve."""
    backing, mount, control_fd = sys.argv[1], sys.argv[2], int(sys.argv[3])
    control = socket.socket(fileno=control_fd)
    try:
        # What the kernel has announced it may take back, when the caller is killed meanwhile.
        fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        libc = ctypes.CDLL(None, use_errno=True)
        options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other"
        if libc.mount(b"faulty", os.fsencode(mount), b"fuse", 0, options.encode()):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    except OSError as exc:
        control.sendall(json.dumps({"error": f"FUSE: {exc}"}).encode() + b"\n")
        return
    control.sendall(b'{"hit": [], "hanging": 0}\n')
    Server(backing, fuse, control).run()


if __name__ == "__main__":
    main()
