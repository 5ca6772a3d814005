"""Sharing by TLS: real certificates, in front of a real server."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis

from ssd.errors import ConfigError
from ssd.sharing.connection import connect
from tests.redis_server import RedisServer, redis_server
from tests.sharing_replica import eventually, replica

__all__ = ["redis_server"]  # the fixture


class Certificates:
    """Of an authority, of a server called ``name``, and of a client, whose key has the password "sesame"."""

    def __init__(self, directory: Path, name: str) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("no openssl")
        directory.mkdir()
        self.authority, authority_key = directory / "ca.pem", directory / "ca.key"
        self._run("req", "-x509", *_KEY, "-keyout", authority_key, "-out", self.authority, "-subj", "/CN=authority")
        self.server, self.server_key = directory / "server.pem", directory / "server.key"
        self.client, self.client_key = directory / "client.pem", directory / "client.key"
        for certificate, key, subject in (
            (self.server, self.server_key, name),
            (self.client, self.client_key, "client"),
        ):
            request, names = directory / "request", directory / "names"
            names.write_text(f"subjectAltName={'IP' if subject[0].isdigit() else 'DNS'}:{subject}\n")
            self._run("req", *_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={subject}")
            signed_by = ("-CA", self.authority, "-CAkey", authority_key, "-CAcreateserial", "-extfile", names)
            self._run("x509", "-req", "-in", request, "-out", certificate, "-days", "2", *signed_by)
        locked = directory / "locked.key"
        self._run("pkcs8", "-topk8", "-in", self.client_key, "-out", locked, "-passout", "pass:sesame")
        self.client_key = locked

    @staticmethod
    def _run(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@contextmanager
def tls_before(server: RedisServer, files: Certificates) -> Iterator[int]:
    """A port where ``server`` speaks TLS and wants a client's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.server, files.server_key)
    context.load_verify_locations(files.authority)
    context.verify_mode = ssl.CERT_REQUIRED

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
        except OSError:
            pass
        finally:
            for each in (source, target):
                each.close()

    def accept() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                outer = context.wrap_socket(plain, server_side=True)
                inner = socket.create_connection(("127.0.0.1", server.port))
            except OSError:
                plain.close()
                continue
            for ends in ((outer, inner), (inner, outer)):
                threading.Thread(target=pump, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_replicas_share_by_tls_with_certificates_of_both_sides(redis_server: RedisServer, tmp_path: Path) -> None:
    files = Certificates(tmp_path / "right", "127.0.0.1")
    own = f"ssl_certfile={files.client}&ssl_keyfile={files.client_key}&ssl_password=sesame"
    with tls_before(redis_server, files) as port:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={files.authority}&{own}"
        with replica(url) as one, replica(redis_server.url) as two:
            one.append([1, 2])
            eventually(lambda: two.stored() == [[1, 2]])
            two.append([3])
            eventually(lambda: one.stored() == [[1, 2], [3]])
        for refused in (
            f"rediss://127.0.0.1:{port}/0?{own}",  # an authority nobody knows
            f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={files.authority}",  # no certificate of the client
            f"rediss://localhost:{port}/0?ssl_ca_certs={files.authority}&{own}",  # another name
        ):
            with closing(connect(refused)) as client, pytest.raises(redis.ConnectionError):
                client.ping()
        unchecked = f"rediss://localhost:{port}/0?ssl_ca_certs={files.authority}&ssl_check_hostname=false&{own}"
        with closing(connect(unchecked)) as client:
            assert client.ping()
        with pytest.raises(ConfigError, match="ssl_password right") as caught:
            connect(url.replace("sesame", "s3cret"))
        assert "s3cret" not in str(caught.value)
