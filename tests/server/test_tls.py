"""TLS between a real server and clients, and what is said of files that cannot be."""

import asyncio
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from running_server import RunningServer

from foretoken.engine.errors import ConfigError
from foretoken.server.bench.load_client import LoadClient, ServerFailed
from foretoken.server.terminal.client import ChatClient, ChatError
from foretoken.server.tls import TlsConfig


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: key and cert, and key2 of another one."""
    monkeypatch.chdir(tmp_path)
    for n in ("2", ""):
        command = f"openssl req -x509 -nodes -newkey ed25519 -subj /CN=x -addext subjectAltName=IP:127.0.0.1 -keyout key{n} -out cert"
        subprocess.run(command.split(), check=True, capture_output=True)
    return tmp_path


@pytest.mark.usefixtures("files")
def test_what_is_wrong_is_a_sentence() -> None:
    for wrong, said in (
        (TlsConfig("key"), "TLS needs a certificate: .* --ssl-certfile"),
        (TlsConfig(None, "cert"), "with its key behind it: name that with --ssl-keyfile"),
        (TlsConfig("key2", "cert"), "cert is no certificate in PEM with its key in --ssl-keyfile key2"),
        (TlsConfig("none", "cert"), "--ssl-keyfile none cannot be read: No such file"),
        (TlsConfig("key", "."), "--ssl-certfile . cannot be read: Is a directory"),
        (TlsConfig("key", "cert", None, 1), "--ssl-cert-reqs 1 needs certificates"),
        (TlsConfig("key", "cert", "key", 2), "--ssl-cert-reqs 2 needs certificates"),
    ):
        with pytest.raises(ConfigError, match=said):
            wrong.context()
    context = TlsConfig("key", "cert", "cert", 2).context()
    assert context is not None and context.verify_mode == 2 and len(context.get_ca_certs()) == 1


def test_https(files: Path, server_process: Callable[..., RunningServer], tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(files / "cert"))
    server = server_process(tiny_target, "--ssl-keyfile=key", "--ssl-certfile=cert")
    assert server.url.startswith("https://") and server.complete()["choices"]
    with closing(ChatClient(server.url, None)) as client:
        assert client.choose_model(None) == asyncio.run(LoadClient(server.url).model()) == str(tiny_target)
    monkeypatch.delenv("SSL_CERT_FILE")
    with closing(ChatClient(server.url, None)) as client, pytest.raises(ChatError, match="not trusted here: .* in SSL_CERT_FILE"):
        client.choose_model(None)
    with pytest.raises(ServerFailed, match="not trusted here: .* in SSL_CERT_FILE"):
        asyncio.run(LoadClient(server.url).model())
    assert server.stop() == 0 and "Traceback" not in server.log
