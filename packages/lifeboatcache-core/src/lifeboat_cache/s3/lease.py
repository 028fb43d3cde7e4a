"""Which node looks after a bucket: one at a time, by an object that is replaced conditionally.

Two at once do no harm, they are only twice the work: so a server that knows no conditions, or a
node that was away for longer than its lease, is no danger.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from typing import Any

from lifeboat_cache.s3.client import S3Client
from lifeboat_cache.s3.errors import Fault, S3Error
from lifeboat_cache.targets.hosts import this_process

__all__ = ["LEASE_S", "BucketLease"]

#: Who has not renewed it for so long has lost it, by the server's clock.
LEASE_S = 1200.0

#: It is renewed at most this often.
_RENEW_S = 300.0


class BucketLease:
    """The claim of this process to look after what is below a prefix of a bucket.

    Parameters
    ----------
    client
        The bucket.
    key
        The object.
    clock
        Seconds that never jump.

    Attributes
    ----------
    says
        What this process tells others while it has the lease: known to them after the next
        renewal.
    heard
        What another one that has it says.
    """

    def __init__(
        self, client: S3Client, key: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._key = key
        self._clock = clock
        self._claim = secrets.token_hex(8)
        self._renewed: float | None = None
        self.says: dict[str, Any] = {}
        self.heard: dict[str, Any] = {}

    def take(self) -> str:
        """Take the lease, or keep it; costs two requests when that is due.

        Returns
        -------
        str
            Who has it instead, for people; empty if it is this process.

        Raises
        ------
        S3Error
            If the bucket does not answer.
        """
        now = self._clock()
        if self._renewed is not None and now - self._renewed < _RENEW_S:
            return ""
        self._renewed = None
        owner, tag = self._owner()
        mine = owner.get("claim") == self._claim
        present = self._client.now()
        # One that ends much later than any that is written now is nonsense.
        if not mine and present < _until(owner) < present + 3 * LEASE_S:
            said = owner.get("says")
            self.heard = said if isinstance(said, dict) else {}
            return f"pid {owner.get('pid', '?')} on {owner.get('host', 'another host')}"
        document = {
            **this_process().to_json(),
            "claim": self._claim,
            "until": present + LEASE_S,
            "says": self.says,
        }
        data = json.dumps(document).encode() + b"\n"
        done = (
            self._client.put(self._key, data, replacing=tag)
            if tag
            else self._client.put(self._key, data, absent=True)
        )
        # What failed may be one's own first attempt, whose answer was lost.
        if not done and self._owner()[0].get("claim") != self._claim:
            return "another host, which was faster"
        self._renewed = now
        return ""

    def keep(self) -> bool:
        """Renew it if that is due; whether this process has it still. Raises :class:`S3Error`."""
        return self._renewed is not None and not self.take()

    def release(self) -> None:
        """Let another node begin at once. Idempotent; faults are swallowed."""
        held, self._renewed = self._renewed, None
        if held is None:
            return
        with contextlib.suppress(S3Error):
            owner, tag = self._owner()
            if tag and owner.get("claim") == self._claim:
                self._client.put(
                    self._key, json.dumps({**owner, "until": 0}).encode() + b"\n", replacing=tag
                )

    def _owner(self) -> tuple[dict[str, Any], str]:
        """What the object says, and its tag; empty without one."""
        try:
            data, tag = self._client.get_tagged(self._key)
        except S3Error as error:
            if error.fault is Fault.MISSING:
                return {}, ""
            raise
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        return (found if isinstance(found, dict) else {}), tag


def _until(owner: dict[str, Any]) -> float:
    """When a lease ends, by the server's clock; 0.0 if it does not say."""
    until = owner.get("until")
    return float(until) if isinstance(until, (int, float)) else 0.0
