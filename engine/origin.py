"""Whose request it is: what it says of its turn among others, and of whom it may share a cache and answers with."""

import hashlib
from dataclasses import dataclass

ANYONE = "anyone"
"""The tenant in a corpus id where nobody tells callers apart."""
COMMON = "default"
"""The name in it where the request gives none."""


@dataclass(frozen=True)
class Origin:
    priority: int = 0  # lower goes first
    cache_salt: str = ""  # may be a secret
    tenant: str = ""  # where several parties share a server: none may learn from the prefix cache or a corpus what another has asked

    @property
    def whole_salt(self) -> str:
        """Requests find in the prefix cache what those with the same one have left there."""
        return ".".join(part for part in (self.tenant, self.cache_salt) if part)

    def corpus_id(self, name: str | None) -> str:
        """Whose answers a request may learn from: "TENANT.NAME", and a hash of the salt if there is one.

        Requests that differ in any of the three share nothing. The salt cannot be read from the id.
        """
        salted = (hashlib.sha256(self.cache_salt.encode()).hexdigest()[:16],) if self.cache_salt else ()
        return ".".join((self.tenant or ANYONE, name or COMMON, *salted))


ANYBODY = Origin()
