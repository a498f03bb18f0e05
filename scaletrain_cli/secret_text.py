"""Hide secrets in texts that are written to files, by the values of secret variables and by the forms of secrets.

Standard library only: training programs use this module before they import anything else.
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

HIDDEN = "(not shown)"
_BEFORE = r"(?<![A-Za-z0-9])"
# What follows are public forms: the rules of gitleaks and trufflehog, GitHub's list of supported secret scanning
# patterns, and the documentation of the vendors.
_PREFIXES = (
    "sk- sk_live_ sk_test_ sk_prod_ rk_live_ rk_test_ rk_prod_ whsec_ gsk_ xai- pplx- nvapi- r8_ pcsk_ lsv2_pt_ "
    "lsv2_sk_ tvly- csk- tgp_v1_ rpa_ esecret_ ABSK npm_ pypi- rubygems_ CLOJARS_ dckr_pat_ dckr_oat_ dop_v1_ "
    "doo_v1_ dor_v1_ sbp_ sb_secret_ pscale_tkn_ pscale_pw_ pscale_oauth_ fm2_ fo1_ HRKU- nfp_ tskey- hvs. hvb. hvr. "
    "GOCSPX- ya29. sq0atp- sq0csp- shpat_ shpca_ shppa_ shpss_ xapp- lin_api_ ntn_ PMAK- NRAK- glsa_ glc_ sntrys_ "
    "sntryu_ figd_ ATATT3 ATCTT3 ATBB CCIPAT_ bkua_ pnu_ dbtc_ dt0c01. ops_ sqp_ squ_ sqa_ AKCp cmVmdGtu eyJhcGlf "
    "xkeysib- FLWSECK AGE-SECRET-KEY-1 ddp_ tfp_ EZAK EZTK aio_ rdme_"
).split()
_STARTS = "|".join(map(re.escape, _PREFIXES))
_KEYS_IN_BASE64 = "BQUklWQVRF|BSU0Eg|BFQyBQ|BPUEVOU1NI|BFTkNSWVBU|BEU0Eg"  # of -----BEGIN PRIVATE KEY, ... RSA, ... EC
# Regular expressions by the kind of secret, as a message names it. A file is searched for these alone: others, such as
# a password in a URL, are frequent in documentation and tests.
TOKEN_FORMS = {
    "a Hugging Face token": r"(hf_|api_org_)[A-Za-z0-9]{16,}",
    "a GitHub token": r"(gh[pousr]_|github_pat_)[A-Za-z0-9_]{20,}",
    "a GitLab token": r"gl(pat|dt|rt|cbt|ptt|ft|imt|agent|oas|soat|ffct)-[A-Za-z0-9_-]{16,}",
    "a Slack token": r"xox[a-z](\.xox[a-z])?-[A-Za-z0-9-]{10,}",
    "an AWS access key": r"(AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}(?![0-9A-Z])",
    "a Google API key": r"AIza[0-9A-Za-z_-]{30,}",
    "a Weights & Biases API key": r"wandb_v\d+_[A-Za-z0-9_]{16,}",
    "a JSON Web Token": r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{4,}",
    "an Azure key": (
        r"(?i:(account|shared_?access)_?key)\s*=\s*[A-Za-z0-9+/]{32,}={0,2}|[\w~.]{3}\dQ~[\w~.-]{31,34}(?![\w~.-])"
    ),
    "an API key": (
        rf"({_STARTS})(?=[\w.~-]*\d)[\w.~-]{{16,}}|SG\.[\w-]{{16,}}\.[\w-]{{16,}}|(SK|key-|dapi|[0-9a-f]{{32}}-us\d)"
        r"[0-9a-f]{32}(?![0-9a-f])|[0-9a-f]{32}-us\d{1,2}(?!\w)|pul-[0-9a-f]{40}|sha256~[\w-]{43}|fw_[A-Za-z0-9]{22,}"
        r"|\d{8,10}:AA[\w-]{33}|\w{14}\.atlasv1\.[\w-]{60,}|dp\.[a-z]{2,5}\.[A-Za-z0-9]{40,}|LTAI[A-Za-z0-9]{12,20}(?!\w)"
        r"|AKID[A-Za-z0-9]{32}(?!\w)|AQVN[\w-]{35,}|secret_[A-Za-z0-9]{43}(?!\w)|oy2[a-z0-9]{43}(?!\w)|EAA[A-Za-z0-9]{80,}"
        r"|[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,}|pat-(na|eu)\d-[0-9a-f-]{36}|access_token\$production\$\w{16}\$\w{32}"
    ),
    "an encoded private key": rf"LS0tLS1CRUdJTi({_KEYS_IN_BASE64})[A-Za-z0-9+/=]*|PuTTY-User-Key-File-\d",
    "a webhook URL": (
        r"(?i:https?://(hooks\.slack\.com/(services|workflows|triggers)|(\w+\.)?discord(app)?\.com/api/webhooks|"
        r"[\w.-]+\.webhook\.office\.com)/[^\s'\"]+)"
    ),
}
_OTHER_FORMS = {
    "a private key": r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY([\s\S]{0,20000}?-----END [A-Z0-9 ]*PRIVATE KEY)?",
    "an authorization header": (
        r"(?i:\bbearer\s+[A-Za-z0-9._~+/-]{16,}"
        r"|authorization['\"]?\s*[=:]\s*['\"]?(basic|token|apikey)\s+[A-Za-z0-9._~+/=-]{8,})"
    ),
    "a password beside its name": (
        rf"(?i:{_BEFORE}(password|passwd|pwd|(api|access|secret|private|account)[_-]?key|auth[_-]?token)"
        r"['\"]?\s*[=:]\s*['\"]?[^\s,;'\"/]{6,}[^\s,;'\"]*)"
    ),
    "a signature in a URL": (
        r"(?i:[?&](sig|signature|x-(amz|goog)-(signature|credential|security-token)|awsaccesskeyid|token|access[_-]?token)"
        r"=[^&\s]{4,})"
    ),
    "a password in a URL": (
        r"[A-Za-z][A-Za-z0-9+.-]*://[^/\s:@]*:[^/\s@$]{1,}@|https?://(?=[\w-]*\d)[\w-]{20,}@"  # or a token in its place
    ),
}
# A key as a file has it, not the marker alone, which code that reads keys contains.
_KEY_BLOCK = re.compile(
    rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----(\\[nr]|[\s\"',+\\>|]|[A-Za-z-]+: [^\n]*\n){1,40}[A-Za-z0-9+/]{40}"
)


_TOKEN = rf"{_BEFORE}(?:{'|'.join(TOKEN_FORMS.values())})"
SECRET_FORM = re.compile("|".join((_TOKEN, *_OTHER_FORMS.values())), re.ASCII)
# Of documentation and tests. The last three: the key of Azure's emulator, and the examples of jwt.io and RFC 7515.
_PLACEHOLDER = re.compile(
    rb"(?i)example|x{4}|your|dummy|fake|placeholder|1234567|abcdefg|\*{4}|Eby8vdM02x|SflKxwRJSM|dozjgNryP4"
)
_LEAST_BITS = 3.0  # per character of a token, as in gitleaks; "aaaaaaaa" has none
_RANDOM_PART = re.compile(rb"(?=[A-Za-z]*\d)[A-Za-z0-9]{12}")  # names such as sk-ecdsa-sha2-nistp256 have shorter words
# The names of variables and keys that hold a secret, in lower case.
SECRET_NAME = re.compile(
    r"(token|secrets?|password|passwd|passphrase|passcode|credentials?|(ssh|pg|db|my|root|user|admin|smtp|mail|redis)pass"
    r"|(api|access|secret|private|auth|account|admin|deploy|encryption|license|master|service|shared|signing|storage)[_-]?key"
    r"|(?<=[_.\-/])(pwd|pw|pat)|(?<![a-z0-9])(pass|creds?|jwt|bearer))"
    r"([_-]?(\d+|prod|production|dev|staging|test|ci|read|write|ro|rw|old|new|backup|value|b64|base64|plain|raw))?$"
)
_SHORTEST_VALUE = 4  # hiding a shorter value would only make a text unreadable


def secret_kind(text: str) -> str | None:
    """Return the kind of the first secret in a text, such as ``a GitHub token``; None without one."""
    matched = SECRET_FORM.search(text)
    forms = (*TOKEN_FORMS.items(), *_OTHER_FORMS.items())
    return matched and next(kind for kind, form in forms if re.fullmatch(form, matched[0], re.ASCII))


def token_in_file(content: bytes, *, placeholders: bool) -> str | None:
    """Return the kind of the first token or private key in a file; None without one.

    ``placeholders``: also what has the form of a token in documentation and tests, such as ``hf_xxxx...``.
    """
    text = content.replace(b"\0", b"")  # of UTF-16
    if _KEY_BLOCK.search(text):
        return "a private key"
    for matched in re.finditer(_TOKEN.encode(), text):  # compiled at its first use: it takes 2 ms
        counts = Counter(matched[0]).values()
        bits = -sum(count / sum(counts) * math.log2(count / sum(counts)) for count in counts)
        is_random = bits >= _LEAST_BITS and _RANDOM_PART.search(matched[0])
        if placeholders or (is_random and not _PLACEHOLDER.search(matched[0])):
            return secret_kind(matched[0].decode())
    return None


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
    return [hide_values_in(element, values) for element in item] if isinstance(item, list | tuple) else item
