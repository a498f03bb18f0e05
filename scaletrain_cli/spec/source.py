"""The text of a run spec: YAML, ``--set`` overrides and ``--vary`` variants as plain data, with the line of each key.

Independent of the keys of the schema.
"""

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from scaletrain_cli.errors import Place, Problem, SpecError, UsageError

VARY_OPTION = "--vary"
_MOST_VARIANTS = 24  # columns of a comparison; more are not readable


def variants(settings: Sequence[str], option: str = VARY_OPTION, most: int = _MOST_VARIANTS) -> list[tuple[str, ...]]:
    """Return all combinations of ``KEY=A,B,C`` settings, each a tuple of overrides ``KEY=A``.

    Returns one empty tuple without settings. Commas inside brackets, braces or quotes belong to the value; ``option``
    is named in errors. Raises UsageError.
    """
    lists = [_one_setting(setting, option) for setting in settings]
    combinations = list(itertools.islice(itertools.product(*lists), most + 1))
    if len(combinations) > most:
        raise UsageError(f"{option} makes more than {most} variants. Give fewer values, or fewer keys.")
    return combinations


def _one_setting(setting: str, option: str) -> list[str]:
    key, equals, text = setting.partition("=")
    values = _split(text)
    if not equals or not key.strip() or not all(value.strip() for value in values):
        message = f"must look like section.key=value,value, as in layout.zero_stage=1,2,3, not {shown(setting)}."
        raise UsageError(f"{option} is invalid", (Problem(option, "", message),))
    return [f"{key.strip()}={value.strip()}" for value in dict.fromkeys(values)]


def _split(text: str) -> list[str]:
    """Split a text at commas outside of brackets, braces and quotes."""
    pieces, depth, quote = [""], 0, ""
    for char in text:
        if char == "," and depth == 0 and not quote:
            pieces.append("")
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "[{") - (char in "]}")
        pieces[-1] += char
    return pieces


Key = tuple[str | int, ...]

SET_OPTION = "--set"
# Mappings with names that the user chooses, in which null removes an entry.
MAPPINGS = frozenset(
    {"chat_template_kwargs", "env", "extra", "node_selector", "options", "roles", "secrets", "weights"}
)


def key_of(dotted: str) -> Key:
    """Return the key of a dotted name; a number is the position in a list, from 0."""
    return tuple(int(part) if part.isdigit() else part for part in dotted.split("."))


_DEEPEST = 40  # maximum nesting; real specs have fewer than ten levels
_LARGEST = 20_000  # values, with aliases expanded; a spec has about a hundred, a YAML bomb has billions


class Source:
    """The location of each key of a spec (``file:line`` or ``--set``), and what was ignored in its config.json."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: dict[Key, str] = {}
        self.ignored_config_keys: tuple[str, ...] = ()
        self.values = 0

    def place(self, key: Key) -> str:
        """Return the location of ``key``, or of the nearest enclosing key."""
        while key and key not in self.places:
            key = key[:-1]
        return self.places.get(key, Place(self.file, 1))

    def move_to_option(self, key: Key) -> None:
        """Record that ``key`` and all keys under it come from the command line."""
        self.places = {other: place for other, place in self.places.items() if other[: len(key)] != key}
        self.places[key] = SET_OPTION


def parse_yaml(text: str, source: Source) -> dict[str, Any]:
    """Parse a YAML mapping and record the lines of its keys in ``source``. Raises SpecError."""
    if _is_nested_too_deeply(text):
        raise SpecError(
            f"{source.file} is not a run spec", (Problem(Place(source.file, 1), "", "is nested too deeply."),)
        )
    plain = _plain(_load(text, source.file), (), source)
    if not isinstance(plain, dict):
        hint = "Start with `schema: scaletrain/v1`; `scaletrain init` writes a complete example."
        raise SpecError(f"{source.file}: a run spec is a mapping of sections.", remedy=hint, file=source.file)
    return plain


def read_documents(text: str) -> list[Any]:
    """Return the plain data of each YAML document in a text that this package has written."""
    from ruamel.yaml import YAML

    return list(YAML(typ="safe", pure=True).load_all(text))


def apply_override(raw: dict[str, Any], override: str, source: Source) -> Iterator[Problem]:
    """Set one ``a.b=c``, or ``a.0.b=c`` in an item of a list; the value is parsed as YAML.

    Yields a problem instead of raising.
    """
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        yield Problem(
            SET_OPTION, "", f"must look like section.key=value, as in training.steps=100, not {shown(override)}."
        )
        return
    try:
        value = parse_yaml(f"value: {text}", Source(SET_OPTION)).get("value")
    except SpecError as error:
        why = error.problems[0].message if error.problems else error.message
        yield Problem(SET_OPTION, shown(name), f"is not a YAML value: {why}", shown(text))
        return
    target: Any = raw
    key: Key = ()
    for depth, part in enumerate(parts):
        before = shown(".".join(parts[:depth]))
        if isinstance(target, list):
            if not part.isdecimal() or int(part) >= len(target):
                count = f"{before} has {len(target)} items, numbered from 0"
                yield Problem(SET_OPTION, shown(name), f"cannot be set: {count}.")
                return
            item: Any = int(part)
        elif isinstance(target, dict):
            item = part
        else:
            yield Problem(SET_OPTION, shown(name), f"cannot be set: {before} is not a section.")
            return
        key = (*key, item)
        if depth == len(parts) - 1:
            if value is None and MAPPINGS.intersection(key[-2:-1]) and isinstance(target, dict):
                target.pop(item, None)
            else:
                target[item] = value
            break
        if (target[item] if isinstance(target, list) else target.get(item)) is None:
            target[item] = {}
            source.places.setdefault(key, SET_OPTION)
        target = target[item]
    source.move_to_option(key)


def shown(value: Any) -> str:
    """Return a value for an error message: one line of ASCII, shortened if long."""
    if isinstance(value, int) and abs(value) >= 10**80:
        return "a number of more than 80 digits"  # Python refuses to print some of them
    text = value if isinstance(value, str) else "null" if value is None else repr(value)
    text = str(value).lower() if isinstance(value, bool) else text
    text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= 80 else text[:77] + "..."


def _is_nested_too_deeply(text: str) -> bool:
    """Return True if the nesting is so deep that the YAML parser, quadratic in depth, would take minutes."""
    if re.search(r"(?:[-?] ){100}", text):
        return True
    if text.count("[") + text.count("{") <= 100:
        return False
    steps = ({"[": 1, "{": 1, "]": -1, "}": -1}.get(char, 0) for char in text)
    return max(itertools.accumulate(steps)) > 100


@functools.lru_cache(maxsize=128)  # of a spec, each override is applied twice and the file read for each sweep point
def _load(text: str, file: str) -> Any:
    """Return the tree of ruamel, which nobody changes."""
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import ConstructorError, RoundTripConstructor
    from ruamel.yaml.error import MarkedYAMLError, YAMLError
    from ruamel.yaml.reader import ReaderError

    values: list[Any] = []

    class Constructor(RoundTripConstructor):
        def construct_object(self, node: Any, deep: bool = False) -> Any:
            values.append(node)
            if node in self.recursive_objects:
                raise ConstructorError(None, None, "an alias stands within what it refers to", node.start_mark)
            return super().construct_object(node, deep)

    parser = YAML(typ="rt", pure=True)
    parser.Constructor = Constructor
    try:
        return parser.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Place(file, mark.line + 1) if mark and file != SET_OPTION else file
        what = " ".join(f"{error.context or ''} {error.problem or ''}".split())
        what = re.sub(r' with value ".*" \(original value: ".*"\)', "", what)  # of a duplicate key; may be a secret
        hint = "Indent with spaces; YAML forbids tabs." if "'\\t'" in what else None
        raise SpecError(f"{file} is not valid YAML", (Problem(where, "", f"{what}.", hint=hint),)) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = Problem(Place(file, line), "", f"contains a character that YAML forbids ({error.character!r}).")
        raise SpecError(f"{file} is not valid YAML", (problem,)) from error
    except RecursionError as error:
        raise SpecError(f"{file} is not a run spec", (Problem(Place(file, 1), "", "is nested too deeply."),)) from error
    except (YAMLError, ValueError, TypeError, KeyError, AttributeError, IndexError, NotImplementedError) as error:
        # ruamel lets some malformed scalars (impossible dates, bad tags) escape as plain Python errors. The last value
        # that it began is the one.
        what = shown(" ".join(str(error).split())) or type(error).__name__
        what = "contains a number of more than 4300 digits" if "integer string conversion" in what else what
        line = values[-1].start_mark.line + 1 if values else 1
        raise SpecError(f"{file} is not valid YAML", (Problem(Place(file, line), "", f"{what}."),)) from error


def _plain(node: Any, key: Key, source: Source) -> Any:
    """Return plain Python data from ruamel's tree, and record the line of every key."""
    source.values += 1
    if len(key) > _DEEPEST or source.values > _LARGEST:
        reason = "is nested too deeply." if len(key) > _DEEPEST else "contains too many values for a run spec."
        raise SpecError(f"{source.file} is not a run spec", (Problem(source.place(key[:2]), "", reason),))
    lines = getattr(getattr(node, "lc", None), "data", None) or {}
    if isinstance(node, dict):
        result = {}
        for name, value in node.items():
            text = _joined(str(name)).encode("utf-8", "backslashreplace").decode()
            inner = (*key, text)
            if name in lines:
                source.places[inner] = Place(source.file, lines[name][0] + 1)
            result[text] = _plain(value, inner, source)
        return result
    if isinstance(node, list | tuple | set | frozenset):
        for index in range(len(node)):
            inner = (*key, index)
            if index in lines:
                source.places[inner] = Place(source.file, lines[index][0] + 1)
        return [_plain(value, (*key, index), source) for index, value in enumerate(node)]
    if isinstance(node, bytes):
        problem = Problem(source.place(key), ".".join(map(str, key)), "is binary (!!binary), and must be text.")
        raise SpecError(f"{source.file} is not a run spec", (problem,))
    from ruamel.yaml.scalarbool import ScalarBoolean

    if isinstance(node, ScalarBoolean):  # an anchored boolean, which is an int to Python
        return bool(node)
    for kind in (bool, int, float):
        if isinstance(node, kind):
            return kind(node)
    return node if node is None else _joined(str(node))


def _joined(text: str) -> str:
    """Join surrogate pairs: JSON writes a character beyond 16 bits as two escapes, which YAML keeps as two."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
