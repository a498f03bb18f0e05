"""Hide secrets in texts that are written to files, by the values of secret variables and by the forms of secrets.

Standard library only: training programs use this module before they import anything else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

HIDDEN = "(not shown)"
_BEFORE = r"(?<![A-Za-z0-9])"
# Regular expressions by the kind of secret, as a message names it.
SECRET_FORMS = {
    "a Hugging Face token": rf"{_BEFORE}hf_[A-Za-z0-9]{{16,}}",
    "an API key (sk-...)": rf"{_BEFORE}sk-(?=[\w-]*\d)[A-Za-z0-9_-]{{16,}}",
    "a GitHub token": rf"{_BEFORE}(gh[pousr]_[A-Za-z0-9]{{20,}}|github_pat_[A-Za-z0-9_]{{20,}})",
    "a GitLab token": rf"{_BEFORE}glpat-[A-Za-z0-9_-]{{16,}}",
    "a Slack token": rf"{_BEFORE}xox[a-z]-[A-Za-z0-9-]{{10,}}",
    "an AWS access key": rf"{_BEFORE}(AKIA|ASIA)[0-9A-Z]{{16}}(?![0-9A-Z])",
    "a Google API key": rf"{_BEFORE}AIza[0-9A-Za-z_-]{{30,}}",
    "a Weights & Biases API key": rf"{_BEFORE}wandb_v\d+_[A-Za-z0-9_]{{16,}}",
    "a JSON Web Token": rf"{_BEFORE}eyJ[A-Za-z0-9_-]{{8,}}\.[A-Za-z0-9_-]{{8,}}\.[A-Za-z0-9_-]{{4,}}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "an authorization header": r"(?i:\bbearer\s+[A-Za-z0-9._~+/-]{16,})",
    "a password beside its name": (
        rf"(?i:{_BEFORE}(password|passwd|(api|access|secret|private)[_-]?key|auth[_-]?token)\s*[=:]\s*[^\s,;'\"/]{{6,}})"
    ),
    "a signature in a URL": (
        r"(?i:[?&](sig|signature|x-(amz|goog)-(signature|credential|security-token)|awsaccesskeyid|token|access[_-]?token)"
        r"=[^&\s]{4,})"
    ),
    "a webhook URL": (
        r"(?i:https?://(hooks\.slack\.com/(services|workflows|triggers)|(\w+\.)?discord(app)?\.com/api/webhooks|"
        r"[\w.-]+\.webhook\.office\.com)/[^\s'\"]+)"
    ),
    "a password in a URL": r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:[^/\s@$]{1,}@",
}
SECRET_FORM = re.compile("|".join(f"(?P<f{index}>{pattern})" for index, pattern in enumerate(SECRET_FORMS.values())))
# The names of variables and keys that hold a secret, in lower case.
SECRET_NAME = re.compile(
    r"(^|[_.\-/])(token|secrets?|password|passwd|passphrase|credentials?|(api|access|secret|private|auth)[_-]?key)$"
)
_SHORTEST_VALUE = 4  # hiding a shorter value would only make a text unreadable


def hide_values(text: str, values: Iterable[str]) -> str:
    """Return the text with each of the values, and everything that has the form of a secret, replaced by HIDDEN."""
    for value in sorted(values, key=len, reverse=True):
        for written in {value, repr(value)[1:-1], " ".join(value.split())}:
            text = text.replace(written, HIDDEN) if written else text
    return SECRET_FORM.sub(HIDDEN, text)


def secret_values(environment: Mapping[str, str], names: Collection[str] = ()) -> list[str]:
    """Return the values of the variables in ``names`` and of those that are named like a secret."""
    return [
        value
        for name, value in environment.items()
        if len(value) >= _SHORTEST_VALUE and (name in names or SECRET_NAME.search(name.lower()))
    ]


def hide_values_in(item: Any, values: Collection[str]) -> Any:
    """Return a JSON value with secrets hidden in each of its strings; see hide_values()."""
    if isinstance(item, str):
        return hide_values(item, values)
    if isinstance(item, Mapping):
        return {key: hide_values_in(value, values) for key, value in item.items()}
    return [hide_values_in(each, values) for each in item] if isinstance(item, list | tuple) else item
