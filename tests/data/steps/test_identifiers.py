import ipaddress
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.data.steps import Kept, identifiers
from scaletrain_cli.errors import UsageError
from tests.data.steps.sections import run, step, text_after

ALL = ("email", "ip", "phone", "key")
PEM = "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nMIIEpAIBAAKCAQEA+/x=\n-----END RSA PRIVATE KEY-----"
TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"


@pytest.mark.parametrize(
    "found",
    [
        *("jane.doe@example.org", "a@b.co", "x+tag@mail.example.co.uk", "jürgen@bücher.example", "O_O@x-y.io"),
        *("81.2.69.142", "203.0.112.255", "172.15.0.9", "100.63.255.12"),
        *("2001:4860:4860::8888", "2a00:1450:4001:81b::200e", "2606:2800:220:1:248:1893:25c8:1946"),
        *("+49 30 1234567", "+1 (415) 555-2671", "(415) 555-2671", "415-555-2671", "415.555.2671", "030 123 4567"),
        *("AKIAIOSFODNN7EXAMPLE", "ghp_" + 36 * "a", "hf_" + 34 * "B", "sk-proj-" + 40 * "c", "AIza" + 35 * "d"),
        *("xoxb-123456789012-abcdef", "glpat-" + 20 * "e", "github_pat_" + 22 * "f", PEM, TOKEN),
    ],
)
@pytest.mark.parametrize(
    "around", ["{}", "Write to {}, or call.", "({})", "url=http://x/?q={}&y", "名前：{}。", "<{}>\n"]
)
def test_an_identifier_is_replaced_between_all_kinds_of_text(found: str, around: str) -> None:
    if around.startswith("url=") and not found[0].isalpha():
        around = 'x="{}";'  # after an equals sign, a number may be that of a version
    text = around.format(found)
    result = text_after(step("identifiers", replace=ALL), text)
    names = ("<EMAIL>", "<IP_ADDRESS>", "<PHONE_NUMBER>", "<KEY>")
    assert result in [around.format(name) for name in names], result


@pytest.mark.parametrize(
    "text",
    [
        # no mail address
        *("@property def f", "a @ b.com", "user@localhost", "git@github.com:owner/name.git", "logo@2x.png", "a@b"),
        # private and special addresses
        *("10.1.2.30", "192.168.100.1", "172.16.0.99", "127.0.0.11", "169.254.10.1", "100.64.0.10", "0.0.0.0"),
        *("192.0.2.15", "198.51.100.7", "203.0.113.9", "224.0.0.251", "255.255.255.0", "239.255.255.250"),
        *("fe80::1ff:fe23:4567:890a", "::1", "fd00::1234", "2001:db8::1", "std::vector", "a::b", "12:30:45", "2001:"),
        # versions, sections, dates and other numbers
        *("version 10.15.7.123", "v2.10.14.88", "release 3.14.15.92", "numpy==1.26.40.12", "foo-12.13.14.15.tar.gz"),
        *("1.2.3.4", "12.13.14.15.16", "256.12.13.14", "081.2.69.142", "81.2.69.142-beta", "section 10.12.14.16"),
        *("10.12.14.16 Introduction", "/releases/11.12.13.14/", "<=11.12.13.14", "8.8.8.8"),
        *(
            *("2024-01-31 12:00", "31.12.2024", "1 000 000 000", "978-3-16-148410-0", "3.14159265", "1990-2000"),
            "12345678",
        ),
        *("+1 234", "1234567890123456789", "a1-234-567-8901", "01-02-2024"),
        # no keys
        *("AKIA", "hf_model_name", "sk-learn and sk-image", "eyJhbGciOiJIUzI1NiJ9", "ghp_short", "xoxo-hugs"),
        "-----BEGIN CERTIFICATE-----\nMIIEpAIBAAKCAQEA\n-----END CERTIFICATE-----",
        "-----BEGIN PUBLIC KEY-----",
    ],
)
def test_what_only_looks_like_an_identifier_stays(text: str) -> None:
    one = step("identifiers", replace=ALL)
    assert run(one, text) == Kept(text)
    assert run(one, f"See {text}") == Kept(f"See {text}")


@pytest.mark.parametrize("begin", ["", "## ", "* ", "\t"])
def test_a_number_before_a_word_is_that_of_a_heading_only_where_a_line_begins(begin: str) -> None:
    one, text = step("identifiers", replace=ALL), f"{begin}11.12.14.16 Methods"
    assert run(one, text) == Kept(text)
    assert run(one, f"Before\n{text}") == Kept(f"Before\n{text}")
    assert text_after(one, f"See {text}") == f"See {begin}<IP_ADDRESS> Methods"


def test_kinds_placeholders_and_counts_follow_the_spec() -> None:
    text = f"a@b.co c@d.co 81.2.69.142 +49 30 1234567 {TOKEN}"
    result = run(step("identifiers"), text)
    assert result == Kept(
        "<EMAIL> <EMAIL> <IP_ADDRESS> +49 30 1234567 <KEY>",
        {"identifiers.key": 1, "identifiers.email": 2, "identifiers.ip": 1},
    )
    one = step("identifiers", replace=["email"], placeholders={"email": "[mail]"})
    assert text_after(one, text) == text.replace("a@b.co", "[mail]").replace("c@d.co", "[mail]")
    with pytest.raises(UsageError, match=r"someone@example\.org would be replaced itself"):
        step("identifiers", placeholders={"email": "someone@example.org"})


def test_a_private_key_without_its_end_is_replaced_up_to_its_last_line() -> None:
    lines = "\n".join([64 * "A", 64 * "b"])
    text = f"-----BEGIN PRIVATE KEY-----\n{lines}\nThe key is above. {PEM} and more"
    assert text_after(step("identifiers"), text) == "<KEY>\nThe key is above. <KEY> and more"
    assert text_after(step("identifiers"), "-----BEGIN OPENSSH PRIVATE KEY----- as text") == "<KEY> as text"


@given(st.integers(0, 2**32 - 1))
def test_the_public_addresses_are_those_of_the_standard_library(number: int) -> None:
    address = ipaddress.IPv4Address(number)
    replaced = text_after(step("identifiers"), f"at {address} it") == "at <IP_ADDRESS> it"
    multicast_or_short = address.is_multicast or len(str(address)) == 7
    special = ipaddress.IPv4Network("192.0.0.0/24"), ipaddress.IPv4Network("192.88.99.0/24")
    if not any(address in network for network in special):  # versions of Python differ about these
        assert replaced == (address.is_global and not multicast_or_short)


UNITS = [
    *("a", "a.", "a@", "a@a.", "@", ".@", "a-", "1", "1.", "1-", "(1", "+1", "81.2.69.142", "2001:", ":", "f:"),
    *("eyJaaaaaaaa.", "eyJ", "AKIA", "sk-", "sk-aaaaaaaaaaaaaaaaaaaa.", "xoxb-", "ghp_", "\ufeff", "é", "0 1 ", "1 1"),
    *("-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "-----BEGIN A A A ", "a_@-.", "a%", "\n", "version "),
]


def test_each_repetition_has_a_limit() -> None:
    """Any expression that backtracks without bound takes hours for a line of a megabyte."""
    expressions = {name: found.pattern for name, found in vars(identifiers).items() if isinstance(found, re.Pattern)}
    assert len(expressions) > 8
    without_limit = set()
    for name, pattern in expressions.items():
        operators = re.sub(r"\\.|\[\^?[^]]*\]", "_", pattern)  # escaped characters and classes are none
        if re.search(r"[*+]|\{\d+,\}", operators):
            without_limit.add(name)
        most = max(map(int, re.findall(r"\{(?:\d+,)?(\d+)\}", operators)), default=0)
        assert most <= (16_384 if name == "_KEY" else 64), name
    # The one is for what _PHONE has matched; the other matches where it is asked to, without going back.
    assert without_limit == {"_PHONE_SEPARATORS", "_PEM_LINES"}


def test_long_lines_have_placeholders_from_begin_to_end() -> None:
    """4,000 characters of each part of an identifier, and of mixtures; then a line of a megabyte."""
    one, random_units = step("identifiers", replace=ALL), random.Random(1)
    units = [*UNITS, *("".join(random_units.choices(UNITS, k=40)) for _ in range(4))]
    for unit in units:
        line = unit * (4_000 // len(unit))
        for text in (line, f"@ {line}", f"{line}@ "):  # past the search for an @
            assert run(one, f"a@b.co {text} a@b.co").text.startswith("<EMAIL> "), unit  # type: ignore[union-attr]
    line = "a@- 81.2.69.142 sk- " * 50_000
    assert text_after(one, line) == line.replace("81.2.69.142", "<IP_ADDRESS>")
