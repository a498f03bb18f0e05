"""The object stores and web servers that a path such as s3://bucket/key names, and the credentials to use them.

Credentials come from the environment of the process: variables, or the files that variables of the provider name.
Nothing stores or prints them. http:// is used only for this machine, or where the environment permits it: anyone
between here and such a server can change the data, and with them the model.
"""

import configparser
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from scaletrain_cli.errors import UsageError
from scaletrain_cli.extras import require
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.secret_text import hide_values
from scaletrain_cli.spec.shared_paths import REMOTE_SCHEMES as SCHEMES

# Permits http:// to other machines than this one.
ALLOW_HTTP = "SCALETRAIN_ALLOW_HTTP"
# Retries are those of places.py, which also know short bodies and changed objects.
_NO_RETRIES = {"max_retries": 0}
# For uploads in many parts, of which each is repeated by itself.
_PART_RETRIES = {"max_retries": 10, "retry_timeout": timedelta(seconds=300)}
_CLIENT = {"connect_timeout": "5s", "read_timeout": "20s", "timeout": "120s"}
_S3_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


class PlaceError(UsageError):
    """A remote file cannot be used, and trying again would not help: name, rights, or content (exit 2)."""

    @property
    def code_of_reason(self) -> str:
        """The code of the reason; empty without one."""
        return "" if self.reason is None else self.reason.code

    @property
    def means_other_content(self) -> bool:
        """True if the content of the file is no longer what it was."""
        return self.code_of_reason in ("remote.changed", "remote.not-found", "remote.no-bucket")


@dataclass(frozen=True)
class Place:
    """A remote path in parts. ``bucket``: also a container, or scheme and host of a web server; ``key`` within it."""

    scheme: str
    bucket: str
    key: str

    def sibling(self, key: str) -> str:
        """Return the path of another key of the same bucket."""
        return f"{self.bucket}/{key}" if self.scheme in ("http", "https") else f"{self.scheme}://{self.bucket}/{key}"


def is_remote(path: str) -> bool:
    """Return True for a path of an object store or a web server."""
    scheme, separator, _ = path.partition("://")
    return bool(separator) and scheme in SCHEMES


def parse_place(path: str) -> Place:
    """Return the parts of a remote path. Raises PlaceError if a part is missing, or could hold a secret."""
    parts = urlsplit(path)
    scheme = parts.scheme
    if scheme not in SCHEMES:
        raise PlaceError(Reason("remote.unknown-scheme", {"path": path, "schemes": [f"{s}://" for s in SCHEMES]}))
    if "@" in parts.netloc:
        raise PlaceError(
            Reason("remote.credentials-in-path", {"place": f"{scheme}://{parts.netloc.rpartition('@')[2]}"})
        )
    if scheme in ("s3", "gs", "az"):
        bucket, _, key = path.removeprefix(f"{scheme}://").partition("/")
        if not bucket or any(letter in bucket for letter in "*?["):
            raise PlaceError(Reason("remote.no-bucket-named", {"path": path, "scheme": scheme}))
        return Place(scheme, bucket, key)
    if not parts.hostname or not parts.path.strip("/"):
        raise PlaceError(Reason("remote.no-file-named", {"path": path}))
    if parts.query or parts.fragment:  # a signature, which a spec would keep
        raise PlaceError(Reason("remote.query-in-path", {"path": f"{scheme}://{parts.netloc}{parts.path}"}))
    _require_secure(f"{scheme}://{parts.netloc}", path)
    return Place(scheme, f"{scheme}://{parts.netloc}", parts.path.lstrip("/"))


def _require_secure(endpoint: str, path: str) -> None:
    """Raise PlaceError for http:// to another machine, unless the environment permits it."""
    is_permitted = _is_set(ALLOW_HTTP) or _is_set("AWS_ALLOW_HTTP") or is_loopback(urlsplit(endpoint).hostname or "")
    if endpoint.startswith("http://") and not is_permitted:
        shown = f"http://{urlsplit(endpoint).netloc.rpartition('@')[2]}"  # without a password
        raise PlaceError(Reason("remote.plain-http", {"path": path, "endpoint": shown, "variable": ALLOW_HTTP}))


def is_loopback(host: str) -> bool:
    """Return True for the names and addresses of this machine's loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")


def store_of(place: Place, *, repeats_parts: bool = False) -> Any:
    """Return the obstore store of a place, one for each process. Raises PlaceError, and UsageError without obstore.

    ``repeats_parts``: the store repeats its requests itself, for uploads in parts.
    """
    return _store(place.scheme, place.bucket, os.getpid(), repeats_parts)


def forget_stores() -> None:
    """Forget the stores of this process, as after a change of its environment."""
    _store.cache_clear()


@lru_cache(maxsize=64)
def _store(
    scheme: str, bucket: str, process: int, repeats_parts: bool
) -> Any:  # by process: threads of the library are not forked
    stores = require("obstore.store", "remote")
    endpoint = next((os.environ[name] for name in _S3_ENDPOINTS if os.environ.get(name)), "") if scheme == "s3" else ""
    _require_secure(endpoint, f"{scheme}://{bucket}")
    plain = (endpoint or bucket).startswith("http://")
    settings: dict[str, Any] = {"client_options": {**_CLIENT, "allow_http": plain}}
    settings["retry_config"] = _PART_RETRIES if repeats_parts else _NO_RETRIES
    try:
        if scheme == "s3":
            return stores.S3Store(bucket, config=_s3_config(bucket), **settings)
        if scheme == "gs":
            return stores.GCSStore(bucket, **settings)
        if scheme == "az":
            return stores.AzureStore(bucket, **settings)
        return stores.HTTPStore(bucket, **settings)
    except (require("obstore.exceptions", "remote").BaseError, ValueError) as error:
        # Only the first line, without the settings that the library adds below.
        problem = hide_values(str(error).partition("\n")[0], ())
        raise PlaceError(
            Reason("remote.store-settings", {"bucket": f"{scheme}://{bucket}", "error": problem})
        ) from None


def _s3_config(bucket: str) -> dict[str, str]:
    """Return settings that the library does not read from the environment: those of a profile. Raises PlaceError."""
    if _is_set("AWS_SKIP_SIGNATURE") or any(os.environ.get(name) for name in _S3_CREDENTIALS):
        return {}
    named = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
    settings = _profile(named or "default", os.environ)
    if "access_key_id" in settings:
        return settings
    if named:
        raise PlaceError(Reason("remote.profile-without-keys", {"profile": named}))
    if _is_set("AWS_EC2_METADATA_DISABLED"):  # which the library does not know
        raise PlaceError(Reason("remote.no-credentials", {"bucket": f"s3://{bucket}"}))
    return {}


def _profile(name: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the static keys and the region of a profile of the AWS command line; empty if there is none."""
    home = expand_home("~/.aws")
    files = (
        (environment.get("AWS_CONFIG_FILE") or home / "config", name if name == "default" else f"profile {name}"),
        (environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials", name),
    )
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
    }
    if not (environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")):
        names["region"] = "region"
    settings: dict[str, str] = {}
    for path, section in files:
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, ValueError):
            continue
        if parser.has_section(section):
            settings |= {names[key]: value for key, value in parser.items(section) if key in names}
    return settings
