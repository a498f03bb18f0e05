"""A real S3 server on 127.0.0.1 (moto), and a proxy before it that breaks requests on demand."""

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaletrain_cli.data.sources import places, stores
from tests.conftest import in_ci
from tests.data.remote.faults import FaultyProxy
from tests.waiting import wait_until

# In an environment of its own: the server and kubernetes need different versions of python-dateutil.
SERVER = Path(sys.prefix) / "s3-server" / "bin" / "moto_server"
BUCKET = "training-data"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not SERVER.exists():
        assert not in_ci(), f"{SERVER} is missing: make setup installs it"
        pytest.skip(f"{SERVER} is missing: make setup installs it")
    # Credentials of nobody: the server must not look for real ones.
    variables = {"AWS_ACCESS_KEY_ID": "server", "AWS_SECRET_ACCESS_KEY": "server", "AWS_EC2_METADATA_DISABLED": "true"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | variables
    log = tmp_path_factory.mktemp("s3") / "log"
    command = [str(SERVER), "-H", "127.0.0.1", "-p", "0"]  # it binds a port, then logs which
    with log.open("wb") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as server:

        def url() -> str:
            text = log.read_text(encoding="utf-8")
            assert server.poll() is None, text
            found = re.search(r"Running on (http://[\d.:]+)", text)
            return found[1] if found else ""

        try:
            wait_until(url, "the S3 server listens")
            yield url()
        finally:
            server.kill()


def post(url: str, body: bytes = b"") -> None:
    urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "text/plain"}, method="POST")).close()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Make an empty bucket behind a proxy the store of this process; the proxy counts and breaks requests."""
    post(f"{s3_server}/moto-api/reset")
    with FaultyProxy(s3_server) as proxy:
        variables = {
            "AWS_ACCESS_KEY_ID": "AKIA-of-the-test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": proxy.url,
            places.TIMEOUT: "20",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        signed(f"{s3_server}/{BUCKET}")
        stores._store.cache_clear()
        yield proxy
        stores._store.cache_clear()


def signed(url: str, headers: dict[str, str] | None = None) -> None:
    """Send a PUT request with credentials that the server does not compare."""
    scope = "Credential=any/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    given = {"Authorization": f"AWS4-HMAC-SHA256 {scope}", **(headers or {})}
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=given)).close()
