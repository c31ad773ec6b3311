"""RedisTier: records in a Redis or Valkey server."""

from collections.abc import Sequence

from vmmkv.tiers.record import RECORD_BYTES
from vmmkv.tiers.shared import Refused, SharedTier, client_of
from vmmkv.tiers.threaded import MissedError
from vmmkv.units import MIB


class RedisTier(SharedTier):
    """Records in a Redis or Valkey server: `redis://:password@host:6379/0`; `rediss://` is over TLS.

    Set its `maxmemory`, and `maxmemory-policy allkeys-lru`: else it refuses what it has no room for.
    Raises: ValueError for another URL; TierUnavailable without the package `redis`.
    """

    name = "redis"

    def __init__(self, url: str, *, timeout_s: float = 2.0, record_bytes: int = RECORD_BYTES) -> None:
        redis = client_of("redis", "redis")
        try:
            self._client = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                socket_read_size=MIB,
                retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
            )
        except ValueError:  # whose text may have a part of a password
            raise ValueError(
                "this is no URL of a Redis server; write redis://:password@host:6379/0, and what is no letter or digit in the "
                "password as in %2F"
            ) from None
        self._errors = redis.exceptions
        given = self._client.connection_pool.connection_kwargs
        super().__init__(
            f"redis at {given.get('host', 'localhost')}:{given.get('port', 6379)}",
            timeout_s=timeout_s,
            record_bytes=record_bytes,
        )

    def ask(self, names: Sequence[str]) -> list[bool]:
        """Ask which of these values are there. The question is a use of them."""
        if not names:
            self._client.ping()
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.touch(name)
        return [bool(number) for number in pipeline.execute()]

    def get(self, name: str) -> bytes:
        """A value, or one byte more than a record's of a longer one. Raises MissedError if it is not there."""
        try:
            value: bytes = self._client.getrange(name, 0, self.value_bytes)
        except self._errors.ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                return b""  # a list, say, that another program has put there
            raise
        if not value and not self._client.exists(name):
            raise MissedError(name)
        return value

    def put(self, name: str, header: bytes, record: memoryview) -> None:
        """Set a value of two parts. Raises Refused if the store does not take it."""
        try:
            self._client.set(name, b"".join((header, record)))
        except self._errors.ResponseError as error:
            raise Refused(str(error)) from error
        except self._errors.ConnectionError as error:  # so it ends when a record is too large for it
            self._client.ping()
            raise Refused(str(error)) from error

    def remove(self, name: str) -> None:
        """Delete a value. Raises Refused if the store answers and does not do it."""
        try:
            self._client.unlink(name)
        except self._errors.ResponseError as error:
            raise Refused(str(error)) from error

    def complaint_of(self, error: Exception) -> str | None:
        """Complaint of a store that refuses this client, and the way out; None for any other error."""
        errors = self._errors
        if not isinstance(error, (errors.AuthenticationError, errors.AuthorizationError, errors.ResponseError)):
            return None
        return f"refuses this client: {error}; check its URL, redis://user:password@host:6379/DATABASE, and the user's rights"

    def hang_up(self) -> None:
        """Disconnect all connections, which ends the calls under way."""
        self._client.connection_pool.disconnect()

    def close(self) -> None:
        """End the tier and close the client. See SharedTier.close."""
        super().close()
        self._client.close()
