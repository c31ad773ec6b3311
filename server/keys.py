"""Who asks: API keys told apart in constant time, and a prefix namespace for each, which nobody can guess."""

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whose request it is."""

    name: str
    """For logs; not the key."""
    is_admin: bool = False
    digest: bytes = field(default=b"", repr=False)
    """Of the key, under the server's secret; empty for who has none."""


ANYBODY: Final = Caller(name="anybody")


class Keys:
    """The keys of a server. Its secret is as old as the process, and so are the prefixes that it keeps apart."""

    def __init__(self, api_keys: Iterable[str] = (), admin_key: str | None = None) -> None:
        self._secret = secrets.token_bytes(32)
        self._callers = [
            Caller(name=f"key {number}", digest=self._digest(key.encode())) for number, key in enumerate(api_keys, start=1)
        ]
        self.are_required = bool(self._callers)
        """Whether who has no key is turned away."""
        self.are_several = len(self._callers) > 1
        """Whether one may have to leave something to another; the administrator's does not count."""
        if admin_key is not None:
            self._callers.append(Caller(name="the administrator", is_admin=True, digest=self._digest(admin_key.encode())))

    def identify(self, authorization: bytes | None) -> Caller | None:
        """Whose Authorization header this is; None if nobody's, and nobody unknown may ask.

        `Bearer KEY`; or Basic with the key as password, so that a browser can ask for it: but not for the administrator's,
        for a browser sends it by itself again, whoever wrote the page that makes it.
        """
        scheme, key = _credentials(authorization)
        caller = self._find(key) if key else None
        if caller is not None and not (caller.is_admin and scheme == b"basic"):
            return caller
        return None if self.are_required else ANYBODY

    def sees_all(self, caller: Caller) -> bool:
        """May this caller see what all are doing? Where several keys are, only the administrator."""
        return caller.is_admin or not self.are_several

    def namespace(self, caller: Caller, salt: str | None) -> str | None:
        """What prompts must have in common, beside their tokens, to share what is known of them.

        Without keys it is the salt itself. With keys it is a code over key and salt: who has another key cannot name it, and
        so cannot find out by the time that an answer takes what others have asked.
        """
        if not caller.digest:
            return salt
        return self._digest(caller.digest, b"" if salt is None else b"+" + salt.encode()).hex()

    def _find(self, key: bytes) -> Caller | None:
        """Looks at every key, whichever is the right one, and at digests of one length."""
        digest, found = self._digest(key), None
        for caller in self._callers:
            if hmac.compare_digest(caller.digest, digest):
                found = caller
        return found

    def _digest(self, *parts: bytes) -> bytes:
        # Only the last part has a length that the caller chooses.
        return hmac.digest(self._secret, b"".join(parts), hashlib.sha256)


def _credentials(authorization: bytes | None) -> tuple[bytes, bytes]:
    scheme, _, value = (authorization or b"").partition(b" ")
    scheme, value = scheme.lower(), value.strip()
    if scheme == b"bearer":
        return scheme, value
    if scheme == b"basic":
        try:
            return scheme, base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return scheme, b""
    return scheme, b""
