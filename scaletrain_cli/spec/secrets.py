"""Detect secrets in plain text: in a spec, by the name of their key or by their form, and in files of the user's code.

The content of a spec is written to run.json, job scripts and trackers, the code to the run directory and to pods.
Nothing here prints a value that looks like a secret; a problem names its key or file and its form.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from scaletrain_cli.errors import Place, Problem
from scaletrain_cli.secret_text import HIDDEN, SECRET_NAME, hide_values, secret_kind, token_in_file
from scaletrain_cli.spec.source import Key, Source

_SECRET_KEYS = ("secret_env", "cluster.kubernetes.secrets")
# Sections whose keys are names chosen by the user; elsewhere a key has a known meaning (tokenizer, pad_token, secret).
_FREE_NAMES = ("env", "labels", "annotations", "extra", "node_selector", "config", "args")
_HEX_KEY = re.compile(r"[0-9a-f]{40}")  # of Weights & Biases; a commit hash has the same form
_PASSWORD = re.compile(r"pass(word|wd|phrase|code)|pwd")
_KEY_NAME = re.compile(r"(?i)(^|[_.\-/])(key|auth|dsn)\d*$")  # which may also be of a table, so the value decides
_KEY_VALUE = re.compile(r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9+/]{20,}={0,2}")
_PLAIN = re.compile(
    r"(?i)|true|false|yes|no|on|off|none|null|auto|\d{1,6}|[~./][^\s]*|file://\S+|<[^\s<>]{1,30}>|\[[a-z]{1,10}\]"
)
_RANDOM = re.compile(r"[A-Za-z0-9+_/-]{32,}={0,2}")
_WITH_QUERY = re.compile(r"(?i)https?://[^\s?#]*[?#]")  # of a source of data
_LONGEST_WORD = 12  # between - _ + and /: names of models and runs have shorter parts, possibly with a number
_LARGEST_NUMBER = 10.0**40
_BITS_PER_CHARACTER = 4.2
_CHANGES_PER_CHARACTER = 0.45  # between capitals, small letters and digits: about 0.6 in random text, 0.2 in names


# Files that programs keep secrets in, as globs of the end of a path in lower case. Those of _SETTINGS may hold none.
_CREDENTIALS = (
    "id_rsa id_dsa id_ecdsa id_ed25519 id_ecdsa_sk id_ed25519_sk ssh_host_*_key .ssh/* .gnupg/* secring.* .netrc "
    "_netrc .pgpass .my.cnf .git-credentials .aws/credentials .kube/config kubeconfig kubeconfig.* *.kubeconfig "
    ".docker/config.json .dockercfg .dockerconfigjson .config/gcloud/* application_default_credentials.json .azure/* "
    ".config/gh/hosts.yml .gem/credentials .cargo/credentials* .kaggle/* kaggle.json .huggingface/* .vault-token "
    ".s3cfg .boto rclone.conf .htpasswd .terraformrc terraform.tfstate* .bash_history .zsh_history .python_history "
    "*.p12 *.pfx *.jks *.keystore *.kdbx *.ppk"
).split()
_SETTINGS = (
    ".env .env.* *.env .envrc .npmrc .pypirc .yarnrc.yml .aws/config pip.conf *.pem *.key *.tfvars wandb/settings "
    "credentials credentials.json *-credentials.json credentials.y*ml credentials.toml credentials.ini "
    "*service*account*.json client_secret*.json secrets secrets.json secrets.y*ml secrets.toml secrets.ini secrets.env"
).split()
_EXAMPLES = (".example", ".sample", ".template", ".dist")  # such as .env.example
_ASSIGNED = re.compile(
    r"""^\W*(?:export\s+)?([\w.:/-]+?)["']?\s*[=:]\s*["']?([^\s"',]+)["',]*\s*(?:#.*)?$""", re.MULTILINE
)


def why_private(path: str, content: bytes, *, tracked: bool) -> str | None:
    """Return why a file of the user's code is not for others to read, by its name or its content; None for others.

    ``tracked``: it is part of a repository, so that a name that settings without secrets have too is no reason, and
    placeholders in documentation and tests are none.
    """
    name = f"/{path.lower()}"
    if any(fnmatchcase(name, f"*/{glob}") for glob in _CREDENTIALS):
        return "its name is that of a file with credentials"
    if any(fnmatchcase(name, f"*/{glob}") for glob in _SETTINGS) and not name.endswith(_EXAMPLES):
        text = content.decode("utf-8", "replace")
        if not tracked:
            return "its name is that of a file with secrets"
        if secret_kind(text) or any(_secret_ending(*assigned) for assigned in _ASSIGNED.findall(text)):
            return "it contains a secret"
    kind = token_in_file(content, placeholders=not tracked)
    return None if kind is None else f"it contains {kind}"


@dataclass(frozen=True)
class ClearSecret:
    """A value of a spec that looks like a secret: its key and the reason. ``value`` is never shown."""

    key: Key
    why: str
    value: str

    def __repr__(self) -> str:
        return f"ClearSecret({self.key!r}, {self.why!r})"


def clear_secrets(raw: Mapping[str, Any]) -> tuple[ClearSecret, ...]:
    """Return the values and keys that look like secrets in a spec given as plain data."""
    return tuple(_below(raw, ()))


def with_secrets(problems: list[Problem], raw: Mapping[str, Any], source: Source) -> list[Problem]:
    """Return the problems and one for each secret in plain text, without any text that looks like a secret."""
    secrets = clear_secrets(raw)
    named = _names_of_secrets(raw) if any(problem.key in _SECRET_KEYS for problem in problems) else set()
    others = [secret for secret in secrets if secret.key[0] != "env" or secret.key[-1] not in named]
    cleaned = []  # with no text that looks like a secret
    for problem in problems:
        where = problem.where
        if _hidden(where, secrets) != where:
            where = Place(_hidden(problem.file or where, secrets), problem.line)
        # Values are shown shortened, so the beginning of a secret could remain.
        around = any(problem.key and ".".join(map(str, secret.key)).startswith(problem.key) for secret in secrets)
        names_one = _why_name("?", tuple(problem.key.split("."))) is not None
        if problem.given is not None and (around or names_one):
            problem = replace(problem, given=HIDDEN)
        texts = {name: getattr(problem, name) for name in ("key", "message", "given", "hint")}
        shown: dict[str, Any] = {name: text and _hidden(text, secrets) for name, text in texts.items()}
        reason = problem.reason if shown == texts else None  # its parameters are parts of the message
        cleaned.append(replace(problem, where=where, reason=reason, **shown))
    return [*(_problem(secret, secrets, source) for secret in others), *cleaned]


def _names_of_secrets(raw: Mapping[str, Any]) -> set[object]:
    """Return the names in secret_env and cluster.kubernetes.secrets, whose values in env are reported there."""
    names: set[object] = set()
    for key in _SECRET_KEYS:
        value: Any = raw
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        names |= {name for name in value if isinstance(name, str)} if isinstance(value, list | Mapping) else set()
    return names


def _problem(secret: ClearSecret, secrets: tuple[ClearSecret, ...], source: Source) -> Problem:
    dotted = _hidden(".".join(map(str, secret.key)), secrets)
    name = str(secret.key[-1]) if secret.key[0] == "env" else "NAME"
    message = f"{secret.why}, but specs are stored and sent as plain text."
    hint = f"Remove it here, write secret_env: [{_hidden(name, secrets)}], and export the value before you submit."
    if secret.key[0] == "data" and "://" in secret.value:
        hint = "Remove it here, and use s3://, gs:// or az:// with credentials from the environment."
    return Problem(source.place(secret.key), dotted, message, HIDDEN, hint)


def _hidden(text: str, secrets: tuple[ClearSecret, ...]) -> str:
    """Return the text without the values of the secrets and without anything that has the form of a secret."""
    return hide_values(text, (secret.value for secret in secrets))


def _below(value: Any, key: Key) -> Iterator[ClearSecret]:
    if isinstance(value, Mapping):
        variable, text = str(value.get("name", "")), str(value.get("value", ""))  # of a container's env
        if ending := _secret_ending(variable, text):
            yield ClearSecret((*key, "value"), f"looks like a secret: its name ends in {ending}", text)
        for name, inner in value.items():
            if why := _why_form(str(name), ()):
                yield ClearSecret((*key, str(name)), why, str(name))
            yield from _below(inner, (*key, str(name)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _below(inner, (*key, index))
    elif isinstance(value, str) or (isinstance(value, int | float) and abs(value) < _LARGEST_NUMBER):
        text = str(value)
        why = _why_name(text, key) or (_why_form(text, key) if isinstance(value, str) else None)
        if why is not None:
            yield ClearSecret(key, why, text)


def _why_name(text: str, key: Key) -> str | None:
    """Return why the key indicates a secret; empty for paths, switches and small numbers."""
    if len(key) < 2 or not any(str(part) in _FREE_NAMES for part in key[:-1]):
        return None
    name = next(str(part) for part in reversed(key) if isinstance(part, str))
    ending = _secret_ending(name, text)
    return None if ending is None else f"looks like a secret: its name ends in {ending}"


def _secret_ending(name: str, value: str) -> str | None:
    """Return the end of a name that indicates a secret; None for others, and for paths, switches and small numbers."""
    matched = SECRET_NAME.search(name.lower())
    if matched is None and _KEY_VALUE.fullmatch(value):
        matched = _KEY_NAME.search(name)
    if matched is None or (_PLAIN.fullmatch(value) and not (value.isdigit() and _PASSWORD.search(name.lower()))):
        return None
    return name[matched.start() :].lstrip("_.-/")


def _why_form(text: str, key: Key) -> str | None:
    if (kind := secret_kind(text)) is not None:
        return f"looks like {kind}"
    if key and key[0] == "data" and _WITH_QUERY.match(text):
        return "has a query, which could be a signature"
    if "wandb" in ".".join(map(str, key)).lower() and _HEX_KEY.fullmatch(text):
        return "looks like a Weights & Biases API key"
    return "looks like a secret: random letters and digits" if _is_random(text) else None


def _is_random(text: str) -> bool:
    if _RANDOM.fullmatch(text) is None or text[0] in "/-" or text.count("/") > len(text) // 16:
        return False
    if all(len(word) <= _LONGEST_WORD for word in re.split(r"[-_+/]", text)):
        return False
    kinds = ["a" if c.islower() else "A" if c.isupper() else "0" if c.isdigit() else "" for c in text]
    if min(kinds.count("a"), kinds.count("A"), kinds.count("0")) < 3:
        return False
    changes = sum(one != other for one, other in itertools.pairwise(kinds))
    bits = -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())
    return changes >= _CHANGES_PER_CHARACTER * len(text) and bits >= _BITS_PER_CHARACTER
