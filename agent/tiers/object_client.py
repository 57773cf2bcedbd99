"""The client of an object store: obstore moves the bytes, boto3 finds the credentials. Both come with `tidegate[s3]`.

What the client raises is told apart here, and nowhere else: `Refused` says what the server said, in a sentence without
credentials, and whether another try is worth it. The client itself repeats nothing, so that each attempt is counted.
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

CREDENTIALS_LIVE: Final = timedelta(minutes=10)
"""How long what boto3 found is used before it is asked again; it renews what expires in less than 15 minutes."""
CONNECT_SECONDS: Final = 5.0
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 5.0
BRIEF_SECONDS: Final = 2.0
BRIEF_TIMEOUT_SECONDS: Final = 10.0
"""For what nobody should wait for: the first contact, leases, removal."""

_STATUS: Final = re.compile(r"status code: (\d{3})([^:\n<]*)")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_SYSTEM: Final = re.compile(r'(?:message|error): "([^"]+)"')
_PASSING_STATUS: Final = (408, 429)


class Refused(Exception):
    """A request that failed. `errno` is the nearest that the system knows; `passing`: another try is worth it."""

    def __init__(self, why: str, errno: int, passing: bool) -> None:
        super().__init__(why)
        self.errno = errno
        self.passing = passing


def _nothing() -> None:
    pass


class _Spread(wait_base):
    """Adds a little to a pause, so that threads do not come back all at once. A script may have seeded the module
    `random`, so nothing is drawn from its generator."""

    def __call__(self, retry_state: RetryCallState) -> float:
        return random.SystemRandom().uniform(0.0, FIRST_PAUSE_SECONDS)


class Client:
    """Requests to the objects of one prefix, named without it. Each raises `Refused`, after the retries that
    `retry_seconds` leaves. Threads may share it; a forked child must not use it."""

    def __init__(self, settings: ObjectSettings) -> None:
        """ConfigError or PathUnusable; nothing is asked of the server yet."""
        self._retry_seconds = settings.retry_seconds
        self._obstore = _require("obstore")
        self._store = _store(settings)

    def put(self, key: str, data: memoryview | bytes, repeated: Callable[[], None] = _nothing) -> None:
        """Stores an object, whole or not at all. `data` is not looked at any more afterwards."""
        self._tried(lambda: self._obstore.put(self._store, key, data, use_multipart=False), repeated)

    def get(self, key: str, nbytes: int, repeated: Callable[[], None] = _nothing) -> memoryview:
        """The first `nbytes` of an object, fewer where it is shorter."""
        return memoryview(
            self._tried(lambda: self._obstore.get_range(self._store, key, start=0, length=nbytes), repeated)
        )

    def delete(self, keys: Sequence[str]) -> None:
        """What is gone already is no error."""
        self._tried(lambda: self._obstore.delete(self._store, list(keys)))

    def folders(self, under: str = "") -> list[str]:
        """What stands between `under` and the next slash, of all keys that begin with it, without slashes."""
        found = self._tried(lambda: self._obstore.list_with_delimiter(self._store, under or None))
        return [name.rstrip("/").rpartition("/")[2] for name in found["common_prefixes"]]

    def objects(self, under: str) -> list[dict[str, Any]]:
        """All objects whose keys begin with the folder `under`: `path`, `size`, `last_modified`."""
        return self._tried(lambda: [one for page in self._obstore.list(self._store, under) for one in page])

    def _tried(self, request: Callable[[], T], repeated: Callable[[], None] = _nothing) -> T:
        """`repeated` is called before each attempt but the first."""
        attempts = Retrying(
            stop=stop_after_delay(self._retry_seconds),
            wait=wait_exponential(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS) + _Spread(),
            retry=retry_if_exception(lambda error: isinstance(error, Refused) and error.passing),
            before_sleep=lambda _: repeated(),
            reraise=True,
        )
        return cast(T, attempts(self._once, request))

    def _once(self, request: Callable[[], T]) -> T:
        try:
            return request()
        except (self._obstore.exceptions.BaseError, FileNotFoundError) as error:
            raise self._refused(error) from None

    def _refused(self, error: Exception) -> Refused:
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
            return Refused(why, errno.ENOENT, passing=False)
        if isinstance(error, kinds.PermissionDeniedError | kinds.UnauthenticatedError):
            # Without a status nobody refused anything: whoever was asked for credentials did not answer.
            return Refused(why, errno.EACCES, passing=status is None)
        passing = status is None or status >= 500 or status in _PASSING_STATUS
        return Refused(why, errno.ENOENT if status == 404 else errno.EIO, passing)


def connect(settings: ObjectSettings) -> tuple[Client, Client]:
    """A client for state, and one that is soon done with trying. ConfigError or PathUnusable."""
    brief = replace(
        settings,
        retry_seconds=min(BRIEF_SECONDS, settings.retry_seconds),
        timeout_seconds=min(BRIEF_TIMEOUT_SECONDS, settings.timeout_seconds),
    )
    return Client(settings), Client(brief)


def bucket_key(settings: ObjectSettings) -> str:
    """What two paths have in common when they share a bucket: for the names of lock files."""
    return "s3-" + hashlib.sha256(f"{settings.server}/{settings.bucket}".encode()).hexdigest()[:16]


def unusable(settings: ObjectSettings, error: Refused) -> PathUnusable:
    """What to say at the start."""
    server = settings.server or "Amazon S3"
    remedy = {
        errno.ENOENT: "Create the bucket first, or name another one.",
        errno.EACCES: "These credentials may not read, write and delete there: look at the policy of the bucket.",
    }.get(error.errno, "Is the endpoint right, and can this machine reach it?")
    return PathUnusable(f"{settings.url} at {server} cannot be used: {error}. {remedy}")


def _store(settings: ObjectSettings) -> S3Store:
    stores, boto3, auth = _require("obstore.store"), _require("boto3"), _require("obstore.auth.boto3")
    server = settings.server
    try:
        session = boto3.Session()
        credentials = auth.Boto3CredentialProvider(session, ttl=CREDENTIALS_LIVE)
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
        # Over https nobody can change what is sent; over http the signature covers it, which takes time.
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
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"A path in an object store needs {error.name}: pip install 'tidegate[s3]'.") from error
