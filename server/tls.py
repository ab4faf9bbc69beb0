"""What TLS is served with: the files that vLLM's --ssl flags name, as one context."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from ..engine.errors import ConfigError

UNTRUSTED = "shows a certificate that is not trusted here: name its file, or that of who signed it, in SSL_CERT_FILE"
"""What a client says of such a server."""


@dataclass(frozen=True)
class TlsConfig:
    """Files in PEM, by vLLM's names."""

    ssl_keyfile: str | None = None  # None = the key is in ssl_certfile
    ssl_certfile: str | None = None  # and those that it is signed with, up to its root; None = TLS is not served
    ssl_ca_certs: str | None = None  # who may have signed clients' certificates
    ssl_cert_reqs: int = 0  # ssl.VerifyMode: 0 asks clients for none, 1 checks what they show, 2 insists

    def context(self) -> ssl.SSLContext | None:
        """Raises ConfigError."""
        certificate, key, signers = self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs
        for flag, path in (("keyfile", key), ("certfile", certificate), ("ca-certs", signers)):
            try:
                if path is not None:
                    Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"--ssl-{flag} {path} cannot be read: {error.strerror}") from None
        if certificate is None:
            if self == TlsConfig():
                return None
            raise ConfigError("TLS needs a certificate: name its file, in PEM, with --ssl-certfile")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(certificate, key)
        except OSError:  # ssl.SSLError is one, and what comes of a passphrase that nobody is there to give
            where = f"in --ssl-keyfile {key}" if key else "behind it: name that with --ssl-keyfile"
            raise ConfigError(f"--ssl-certfile {certificate} is no certificate in PEM with its key {where}") from None
        if self.ssl_cert_reqs:
            try:
                context.load_verify_locations(signers or "")
            except OSError:
                raise ConfigError(f"--ssl-cert-reqs {self.ssl_cert_reqs} needs certificates in PEM: --ssl-ca-certs") from None
            context.verify_mode = ssl.VerifyMode(self.ssl_cert_reqs)
        return context
