"""What goes wrong with an object store, told apart by what it means and what to do about it."""

from __future__ import annotations

import errno
from enum import Enum
from typing import Any

from lifeboat_cache.errors import TargetError

__all__ = ["Fault", "S3Error", "missing_boto3", "of_answer", "of_exception", "unreachable"]


class Fault(Enum):
    """What an error means."""

    #: The object is not there.
    MISSING = "missing"
    #: An object of that name is there already, where none was to be.
    EXISTS = "exists"
    #: The bucket is not there.
    BUCKET = "bucket"
    #: Credentials are missing or wrong, or do not allow it.
    DENIED = "denied"
    #: The clocks of this host and of the server differ too much.
    CLOCK = "clock"
    #: The server asks for fewer requests.
    THROTTLED = "throttled"
    #: No connection, no answer in time, or an answer that broke off.
    UNREACHABLE = "unreachable"
    #: The server failed.
    SERVER = "server"
    #: The server does not take the request.
    REFUSED = "refused"


_ERRNO = {
    Fault.MISSING: errno.ENOENT,
    Fault.EXISTS: errno.EEXIST,
    Fault.BUCKET: errno.ENODEV,
    Fault.DENIED: errno.EACCES,
    Fault.CLOCK: errno.EACCES,
    Fault.THROTTLED: errno.EAGAIN,
    Fault.UNREACHABLE: errno.ETIMEDOUT,
    Fault.SERVER: errno.EIO,
    Fault.REFUSED: errno.EINVAL,
}

_CODES = {
    "NoSuchKey": Fault.MISSING,
    "404": Fault.MISSING,
    "NotFound": Fault.MISSING,
    "PreconditionFailed": Fault.EXISTS,
    "ConditionalRequestConflict": Fault.EXISTS,
    "NoSuchBucket": Fault.BUCKET,
    "InvalidBucketName": Fault.BUCKET,
    "RequestTimeTooSkewed": Fault.CLOCK,
    "RequestExpired": Fault.CLOCK,
    "SlowDown": Fault.THROTTLED,
    "Throttling": Fault.THROTTLED,
    "ThrottlingException": Fault.THROTTLED,
    "TooManyRequests": Fault.THROTTLED,
    "RequestLimitExceeded": Fault.THROTTLED,
    "BandwidthLimitExceeded": Fault.THROTTLED,
    "ServiceUnavailable": Fault.THROTTLED,
    "RequestTimeout": Fault.UNREACHABLE,
    "InternalError": Fault.SERVER,
    # The body was damaged on its way: to be sent again.
    "BadDigest": Fault.SERVER,
    "IncompleteBody": Fault.SERVER,
}

_DENIED = (
    "AccessDenied", "AllAccessDisabled", "AuthorizationHeaderMalformed", "ExpiredToken",
    "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired",
)  # fmt: skip


class S3Error(TargetError):
    """What an object store has answered, or not.

    Attributes
    ----------
    fault
        What it means.
    code
        The server's word for it, for people and tests; may be empty.
    """

    def __init__(self, fault: Fault, message: str, code: str = "") -> None:
        super().__init__(_ERRNO[fault], message)
        self.fault = fault
        self.code = code

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed a little later."""
        return self.fault in (Fault.THROTTLED, Fault.UNREACHABLE, Fault.SERVER)


def missing_boto3() -> TargetError:
    """What to raise where boto3 is not installed."""
    return TargetError(
        errno.ENOTSUP,
        "tiers of type s3 need boto3, which is not installed: pip install boto3",
    )


def of_answer(where: str, status: int, code: str, skew_s: float | None = None) -> S3Error:
    """The error that an answer stands for.

    Parameters
    ----------
    where
        The bucket and its endpoint, for people.
    status, code
        Of the answer; ``code`` may be empty.
    skew_s
        By how much this host's clock is ahead of the server's, if known.
    """
    fault = _CODES.get(code)
    if code in _DENIED or (fault is None and status in (401, 403)):
        fault = Fault.DENIED
    if fault is None:
        if status == 404:
            fault = Fault.MISSING
        elif status in (409, 412):
            fault = Fault.EXISTS
        elif status in (429, 503):
            fault = Fault.THROTTLED
        else:
            fault = Fault.SERVER if status >= 500 else Fault.REFUSED
    # A signature that is a day old is refused as wrong by some servers.
    if fault is Fault.DENIED and skew_s is not None and abs(skew_s) > 900:
        fault = Fault.CLOCK
    said = code or f"status {status}"
    return S3Error(fault, f"{where}: {_SAID[fault].format(said=said, skew=_ahead(skew_s))}", code)


_SAID = {
    Fault.MISSING: "there is no such object ({said})",
    Fault.EXISTS: "there is such an object already ({said})",
    Fault.BUCKET: "the bucket does not exist ({said}): create it, or correct the tier's bucket, "
    "region and endpoint_url",
    Fault.DENIED: "the server denies it ({said}): check the credentials (AWS_ACCESS_KEY_ID, "
    "AWS_PROFILE, ~/.aws, or the machine's role) and that they may list, read, write and delete "
    "in the bucket",
    Fault.CLOCK: "this host's clock is {skew} ({said}): set it, best by NTP",
    Fault.THROTTLED: "the server asks for fewer requests ({said}): requests are slowed down; if "
    "it lasts, set the tier's bandwidth_limit_gbps or raise the server's limits",
    Fault.UNREACHABLE: "no answer ({said}): check the network and the tier's endpoint_url",
    Fault.SERVER: "the server failed ({said}): it is tried again; if it lasts, see the server's "
    "log",
    Fault.REFUSED: "the server refuses the request ({said}): check that endpoint_url is that of "
    "an S3-compatible server, and the tier's region",
}


def _ahead(skew_s: float | None) -> str:
    if skew_s is None:
        return "too far from the server's"
    return f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the server's"


def unreachable(where: str, why: str) -> S3Error:
    """No connection, no answer in time, or one that broke off."""
    return S3Error(
        Fault.UNREACHABLE, f"{where}: {_SAID[Fault.UNREACHABLE].format(said=why, skew='')}"
    )


def of_exception(where: str, exc: Exception, skew_s: float | None = None) -> S3Error:
    """The error that an exception of boto3 stands for."""
    from botocore import exceptions

    if isinstance(exc, S3Error):
        return exc
    if isinstance(exc, exceptions.ClientError):
        response: dict[str, Any] = exc.response
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return of_answer(where, status, str(response.get("Error", {}).get("Code", "")), skew_s)
    denied = (
        exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError,
        exceptions.CredentialRetrievalError,
        exceptions.ProfileNotFound,
        exceptions.TokenRetrievalError,
        exceptions.UnauthorizedSSOTokenError,
        exceptions.SSOTokenLoadError,
    )
    if isinstance(exc, denied):
        said = " ".join(str(exc).split())
        return S3Error(Fault.DENIED, f"{where}: {_SAID[Fault.DENIED].format(said=said, skew='')}")
    bad = (exceptions.ParamValidationError, exceptions.NoRegionError, ValueError)
    if isinstance(exc, bad):
        said = " ".join(str(exc).split())[:200]
        return S3Error(Fault.REFUSED, f"{where}: {_SAID[Fault.REFUSED].format(said=said, skew='')}")
    return unreachable(where, type(exc).__name__)
