"""Client of an S3-compatible object store: obstore transfers the bytes, boto3 finds the credentials. Both come with
`tidegate[s3]`.

Errors are classified only here. `RequestFailed` holds the server's reason as a sentence without credentials, and
whether the error is transient. obstore's own retries are switched off, so that each attempt is counted.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_exponential
from tenacity.wait import wait_base

from tidegate.agent.tiers.object_settings import ObjectSettings
from tidegate.errors import ConfigError, PathUnusable

if TYPE_CHECKING:
    from obstore.store import S3Store

T = TypeVar("T")

CREDENTIALS_CACHE: Final = timedelta(minutes=10)
"""How long credentials are used before boto3 is asked again. boto3 renews credentials that expire in less than 15
minutes."""
CONNECT_SECONDS: Final = 5.0
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 5.0
SHORT_RETRY_SECONDS: Final = 2.0
SHORT_TIMEOUT_SECONDS: Final = 10.0
"""Maximum timeout in seconds for each attempt of a request that must not block for long (first contact, leases,
deletion). Such a request is retried for at most SHORT_RETRY_SECONDS."""

_STATUS: Final = re.compile(r"status code: (\d{3})([^:\n<]*)")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_SYSTEM: Final = re.compile(r'(?:message|error): "([^"]+)"')
_TRANSIENT_STATUS: Final = (408, 429)


class RequestFailed(Exception):
    """Failed request. `errno`: the nearest error number of the operating system. `is_transient`: a retry may
    succeed."""

    def __init__(self, why: str, errno: int, is_transient: bool) -> None:
        super().__init__(why)
        self.errno = errno
        self.is_transient = is_transient


class _Jitter(wait_base):
    """Adds a random time (jitter) to each pause before a retry, so that threads do not all retry at once. Uses the
    operating system's random numbers, so that the state of the module `random` does not change."""

    def __call__(self, retry_state: RetryCallState) -> float:
        return random.SystemRandom().uniform(0.0, FIRST_PAUSE_SECONDS)


class Client:
    """Sends requests for the objects under one prefix of an object store. Keys are given without the prefix. A request
    that fails with a transient error is retried for up to `retry_seconds` of the settings. A request that fails finally
    raises `RequestFailed`. Threads may share a client; a forked child must not use it."""

    def __init__(self, settings: ObjectSettings) -> None:
        """Creates obstore's client without sending a request. ConfigError or PathUnusable for settings that cannot
        work."""
        self._retry_seconds = settings.retry_seconds
        self._obstore = _require("obstore")
        self._store = _store(settings)

    def put(self, key: str, data: memoryview | bytes, on_retry: Callable[[], None] | None = None) -> None:
        """Stores an object, completely or not at all. `data` may be reused when this returns. `on_retry`: called before
        each retry."""
        self._retried(lambda: self._obstore.put(self._store, key, data, use_multipart=False), on_retry)

    def get(self, key: str, nbytes: int, on_retry: Callable[[], None] | None = None) -> memoryview:
        """Reads the first `nbytes` of an object; fewer where the object is shorter. `on_retry`: called before each
        retry."""
        return memoryview(
            self._retried(lambda: self._obstore.get_range(self._store, key, start=0, length=nbytes), on_retry)
        )

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects; missing ones are not an error."""
        self._retried(lambda: self._obstore.delete(self._store, list(keys)))

    def folders(self, under: str = "") -> list[str]:
        """Names of the folders directly below the folder `under`, without slashes."""
        listing = self._retried(lambda: self._obstore.list_with_delimiter(self._store, under or None))
        return [name.rstrip("/").rpartition("/")[2] for name in listing["common_prefixes"]]

    def objects(self, under: str) -> list[dict[str, Any]]:
        """Lists all objects whose keys begin with the folder `under`. Each entry has `path` (the key), `size` in bytes
        and `last_modified`."""
        return self._retried(lambda: [entry for page in self._obstore.list(self._store, under) for entry in page])

    def _retried(self, request: Callable[[], T], on_retry: Callable[[], None] | None = None) -> T:
        """Runs a request, with retries. `on_retry`, if given, is called before each attempt but the first."""
        attempts = Retrying(
            stop=stop_after_delay(self._retry_seconds),
            wait=wait_exponential(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS) + _Jitter(),
            retry=retry_if_exception(lambda error: isinstance(error, RequestFailed) and error.is_transient),
            before_sleep=None if on_retry is None else lambda _: on_retry(),
            reraise=True,
        )
        return cast(T, attempts(self._attempt, request))

    def _attempt(self, request: Callable[[], T]) -> T:
        """Runs a request once and converts obstore's errors."""
        try:
            return request()
        except (self._obstore.exceptions.BaseError, FileNotFoundError) as error:
            raise self._classified(error) from None

    def _classified(self, error: Exception) -> RequestFailed:
        """Converts an error of obstore: reason, error number, transient or not."""
        text, kinds = str(error), self._obstore.exceptions
        found = _STATUS.search(text)
        status = int(found[1]) if found else None
        code = _CODE.search(text)
        if found is not None:
            why = f"{status}{found[2].rstrip(' -')}" + (f", {code[1]}" if code else "")
        elif "TimedOut" in text:
            why = "no answer in time"
        else:
            system = _SYSTEM.search(text)
            why = system[1] if system else text.partition("\n")[0]
        if isinstance(error, FileNotFoundError):
            return RequestFailed(why, errno.ENOENT, is_transient=False)
        if isinstance(error, kinds.PermissionDeniedError | kinds.UnauthenticatedError):
            # Without an HTTP status the server refused nothing: the source of the credentials did not respond.
            return RequestFailed(why, errno.EACCES, is_transient=status is None)
        is_transient = status is None or status >= 500 or status in _TRANSIENT_STATUS
        return RequestFailed(why, errno.ENOENT if status == 404 else errno.EIO, is_transient)


def connect(settings: ObjectSettings) -> tuple[Client, Client]:
    """Creates two clients: one for state, and one with short retries and timeouts. Raises ConfigError or PathUnusable
    for settings that cannot work."""
    short = replace(
        settings,
        retry_seconds=min(SHORT_RETRY_SECONDS, settings.retry_seconds),
        timeout_seconds=min(SHORT_TIMEOUT_SECONDS, settings.timeout_seconds),
    )
    return Client(settings), Client(short)


def bucket_key(settings: ObjectSettings) -> str:
    """Lock key of a bucket, used in names of lock files. Two paths with the same key share a lock."""
    return "s3-" + hashlib.sha256(f"{settings.server}/{settings.bucket}".encode()).hexdigest()[:16]


def path_unusable(settings: ObjectSettings, error: RequestFailed) -> PathUnusable:
    """Creates the error PathUnusable from a failed request to an object store. The message names the cause and a
    remedy."""
    server = settings.server or "Amazon S3"
    remedy = {
        errno.ENOENT: "Create the bucket first, or name another one.",
        errno.EACCES: "These credentials do not allow reading, writing and deleting there: check the bucket's policy.",
    }.get(error.errno, "Check that the endpoint is right and that this machine can reach it.")
    return PathUnusable(f"{settings.url} at {server} cannot be used: {error}. {remedy}")


def _store(settings: ObjectSettings) -> S3Store:
    """Creates the obstore object that sends requests to the bucket of these settings. ConfigError for a missing
    package, PathUnusable if no credentials are found."""
    stores, boto3, auth = _require("obstore.store"), _require("boto3"), _require("obstore.auth.boto3")
    server = settings.server
    try:
        session = boto3.Session()
        credentials = auth.Boto3CredentialProvider(session, ttl=CREDENTIALS_CACHE)
    except (ValueError, _require("botocore.exceptions").BotoCoreError) as error:
        why = "none were found" if isinstance(error, ValueError) else str(error)
        raise PathUnusable(
            f"{settings.url} needs credentials: {why}. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE."
        ) from None
    store: S3Store = stores.S3Store(
        settings.bucket,
        prefix=settings.prefix or None,
        region=settings.region or session.region_name or "us-east-1",
        credential_provider=credentials,
        # https protects the payload from changes. Over http the payload is signed, which takes time.
        unsigned_payload=not server.startswith("http://"),
        client_options={
            "allow_http": server.startswith("http://"),
            "connect_timeout": timedelta(seconds=min(CONNECT_SECONDS, settings.timeout_seconds)),
            "timeout": timedelta(seconds=settings.timeout_seconds),
        },
        retry_config={"max_retries": 0},
        **({"endpoint": server} if server else {}),
    )
    return store


def _require(module: str) -> ModuleType:
    """Imports a module of the optional packages `tidegate[s3]`. ConfigError when it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"A path in an object store needs {error.name}: pip install 'tidegate[s3]'.") from error
