"""The step ``identifiers``: replace what identifies a person or gives access by fixed placeholders.

Every expression is bounded: each of its repetitions has a limit, so that a line of any length takes time in proportion
to its length. No expression matches directly after another match, so that a second pass finds nothing new.
"""

import ipaddress
import re
from collections.abc import Callable

from scaletrain_cli.data.steps.base import Document, Kept, Step
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.preparation import IDENTIFIERS, IdentifiersSpec

# ---- mail addresses ----------------------------------------------------------------------------------------------
_EMAIL = re.compile(
    r"(?<!\w)\w(?:[\w.+%-]{0,62}[\w+%-])?@"
    r"(?:[^\W_](?:[^\W_]|-){0,62}\.){1,6}[^\W\d_]{2,24}(?!\w)"
)
_NOT_TOP_LEVEL = frozenset("png jpg jpeg gif svg webp ico css js".split())  # icon@2x.png
_NOT_PERSONS = frozenset(("git",))  # git@github.com:owner/name is an address of a repository

# ---- IP addresses ------------------------------------------------------------------------------------------------
# Begins with a digit, for which the search is fast, and then looks at what is before it.
_IPV4 = re.compile(r"[0-9](?<![\w.+-].)[0-9]{0,2}\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}(?!\.?\w|-\w)")
_IPV6 = re.compile(r"[23](?<![\w:.].)[0-9A-Fa-f]{3}:[0-9A-Fa-f:]{2,34}(?![\w:]|\.\d)")
_CONTEXT = 24  # characters before a number that say whether it is a version or a section
_NUMBERED = re.compile(
    r"(?:\b(?:v|ver|version|versions|release|build|firmware|section|sections|sec|chapter|clause|article|paragraph|"
    r"appendix|figure|fig|table|rev|revision|update|upgrade)[.:]?\s{0,2}|(?:[=<>~!]=|[§~^])\s{0,2}|(?<![:/])/)\Z",
    re.IGNORECASE,
)
_HEADING = re.compile(r"[ \t]{1,4}[^\W\d_]")  # after a number that begins a line: a numbered heading
# What is not routed in the Internet (RFC 6890 and its registries), written out so that no version of Python differs.
_NOT_PUBLIC = [
    (int(network.network_address), int(network.broadcast_address))
    for network in map(
        ipaddress.IPv4Network,
        "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 "
        "192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4".split(),
    )
]
_PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_IPV6 = [
    ipaddress.IPv6Network(network) for network in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
]

# ---- phone numbers -----------------------------------------------------------------------------------------------
_PHONE = re.compile(
    r"(?:[+0-9]|\((?=[0-9]{1,5}\)))(?<![\w.+/=-].)(?:(?<=[+(])[0-9])?"
    r"(?:[ ().\-/]{0,3}[0-9]){6,14}(?![\w-]|[.+(][0-9])"
)
_PHONE_SEPARATORS = re.compile(r"[ ().\-/]+")
_DATE = re.compile(r"(?:\d{4}[-./ ]\d{1,2}[-./ ]\d{1,2}|\d{1,2}[-./ ]\d{1,2}[-./ ]\d{4})(?:\D|\Z)")

# ---- keys --------------------------------------------------------------------------------------------------------
# The texts without which no expression of _KEY matches: looking for them is much faster.
_KEY_PREFIXES = (
    *("AKIA", "ASIA", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "hf_", "sk-", "sk_live_", "xox"),
    *("AIza", "npm_", "pypi-", "SG.", "eyJ", "PRIVATE KEY"),
)
_KEY = re.compile(
    r"(?<![\w-])(?:"
    r"(?:AKIA|ASIA)[0-9A-Z]{16}"  # AWS
    r"|gh[pousr]_[0-9A-Za-z]{36,255}|github_pat_[0-9A-Za-z_]{22,255}|glpat-[\w-]{20,64}"  # GitHub, GitLab
    r"|hf_[0-9A-Za-z]{30,64}"  # Hugging Face
    r"|sk-(?:proj-|ant-|svcacct-)?[0-9A-Za-z_-]{20,256}|sk_live_[0-9A-Za-z]{20,128}"  # OpenAI, Anthropic, Stripe
    r"|xox[abposr]-[0-9A-Za-z-]{10,256}"  # Slack
    r"|AIza[0-9A-Za-z_-]{35}"  # Google
    r"|npm_[0-9A-Za-z]{36}|pypi-[0-9A-Za-z_-]{50,256}|SG\.[\w-]{22}\.[\w-]{43}"  # npm, PyPI, SendGrid
    r"|eyJ[0-9A-Za-z_-]{8,4096}\.eyJ[0-9A-Za-z_-]{8,16384}\.[0-9A-Za-z_-]{8,4096}"  # JSON Web Token
    r")(?![\w-])",
    re.ASCII,
)
_PEM_BEGIN = re.compile(r"-----BEGIN (?:[A-Z0-9]{1,16} ){0,4}PRIVATE KEY(?: BLOCK)?-----")
_PEM_END = re.compile(r"-----END (?:[A-Z0-9]{1,16} ){0,4}PRIVATE KEY(?: BLOCK)?-----")
_PEM_LINES = re.compile(r"(?:(?:\s|\\[nr]){0,8}[0-9A-Za-z+/=]{40,})*")


class Identifiers(Step):
    """Replaces keys first, then mail addresses, IP addresses and phone numbers; a second time changes nothing."""

    changes_text = True

    def __init__(self, spec: IdentifiersSpec) -> None:
        order = ("key", *(name for name in IDENTIFIERS if name != "key"))
        self.replacers = [
            (f"identifiers.{name}", _REPLACERS[name], getattr(spec.placeholders, name))
            for name in order
            if name in spec.replace
        ]
        for _, _, placeholder in self.replacers:
            for _, replace, other in self.replacers:
                if replace(placeholder, other)[1]:
                    raise UsageError(Reason("document_steps.placeholder-matches", {"placeholder": placeholder}))

    def __call__(self, document: Document) -> Kept:
        """Return the text with placeholders, and how many there are of each kind."""
        text, counts = document.text, {}
        for name, replace, placeholder in self.replacers:
            text, count = replace(text, placeholder)
            if count:
                counts[name] = count
        return Kept(text, counts) if counts else Kept(document.text)


def _replace(
    expression: re.Pattern[str], accepts: Callable[[re.Match[str]], bool], text: str, new: str
) -> tuple[str, int]:
    parts, end = [], 0
    for match in expression.finditer(text):
        if accepts(match):
            parts += [text[end : match.start()], new]
            end = match.end()
    return ("".join([*parts, text[end:]]), len(parts) // 2) if parts else (text, 0)


def _is_email(match: re.Match[str]) -> bool:
    name, _, domain = match[0].rpartition("@")
    return domain.rpartition(".")[2].lower() not in _NOT_TOP_LEVEL and name not in _NOT_PERSONS and ".." not in name


def _ips(text: str, new: str) -> tuple[str, int]:
    text, count = _replace(_IPV4, _is_public_ipv4, text, new)
    text, more = _replace(_IPV6, _is_public_ipv6, text, new) if text.count(":") > 1 else (text, 0)
    return text, count + more


def _is_public_ipv4(match: re.Match[str]) -> bool:
    """Return True for a public address; not for a version or the number of a section, which look the same.

    Four single digits are a version far more often than an address; the known ones (8.8.8.8) identify nobody.
    """
    octets = match[0].split(".")
    if any(int(octet) > 255 or (len(octet) > 1 and octet[0] == "0") for octet in octets) or len(match[0]) == 7:
        return False
    address = int.from_bytes(bytes(map(int, octets)), "big")
    if any(first <= address <= last for first, last in _NOT_PUBLIC):
        return False
    before = match.string[max(0, match.start() - _CONTEXT) : match.start()]
    line = before.rpartition("\n")[2]
    begins_line = not line.strip(" \t#*") and (len(line) < _CONTEXT)
    is_heading = begins_line and all(len(octet) < 3 for octet in octets) and _HEADING.match(match.string, match.end())
    return not is_heading and _NUMBERED.search(before) is None


def _is_public_ipv6(match: re.Match[str]) -> bool:
    try:
        address = ipaddress.IPv6Address(match[0])
    except ValueError:
        return False
    return address in _PUBLIC_IPV6 and not any(address in network for network in _NOT_PUBLIC_IPV6)


def _is_phone(match: re.Match[str]) -> bool:
    """Return True for 7 to 15 digits after ``+``, or in three groups and more that are no date, sum or address."""
    number = match[0]
    if number.startswith("+"):
        return True
    separators = _PHONE_SEPARATORS.findall(number.strip("()"))
    digits = "".join(filter(str.isdigit, number))
    if len(separators) < 2 or _DATE.match(number):
        return False
    if set(separators) <= {" "} and not number.startswith("0"):  # 1 000 000 000
        return False
    if set(separators) == {"."} and (len(separators) == 3 or number[0] != "0") and len(separators) > 2:  # a version
        return False
    return not (len(digits) == 13 and digits.startswith(("978", "979")))  # ISBN


def _keys(text: str, new: str) -> tuple[str, int]:
    if not any(prefix in text for prefix in _KEY_PREFIXES):
        return text, 0
    text, blocks = _pem_blocks(text, new)
    text, count = _replace(_KEY, lambda match: True, text, new)
    return text, blocks + count


def _pem_blocks(text: str, new: str) -> tuple[str, int]:
    """Replace private keys, from BEGIN to END; without an END before the next BEGIN, up to the last line of the key."""
    if not (begins := list(_PEM_BEGIN.finditer(text))):
        return text, 0
    parts, end = [], 0
    limits = [begin.start() for begin in begins[1:]] + [len(text)]
    for begin, limit in zip(begins, limits, strict=True):
        closing = _PEM_END.search(text, begin.end(), limit) or _PEM_LINES.match(text, begin.end(), limit)
        assert closing is not None
        parts += [text[end : begin.start()], new]
        end = closing.end()
    return "".join([*parts, text[end:]]), len(begins)


_REPLACERS: dict[str, Callable[[str, str], tuple[str, int]]] = {
    "email": lambda text, new: _replace(_EMAIL, _is_email, text, new) if "@" in text else (text, 0),
    "ip": _ips,
    "phone": lambda text, new: _replace(_PHONE, _is_phone, text, new),
    "key": _keys,
}
