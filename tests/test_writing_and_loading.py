"""Rules for all source files: they write through safe_files, load no format that can run code, and name plainly."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.source_trees import dotted, nodes_of

PROJECT = Path(__file__).parent.parent
PACKAGE = PROJECT / "scaletrain_cli"
HOME = "scaletrain_cli/safe_files.py"  # opens for all others
MOST_SMALL_HELPERS = 40  # may only shrink: who reads one idea should not have to look in many places

MOST_VAGUE_NAMES = 12  # may only shrink: fields of records, and truth values that say whether something was found

# File and call: why it may write by itself.
MAY_WRITE = {
    ("scaletrain_cli/cli/init.py", "shutil.copytree"): "into a folder that the user named and that is made anew",
    **{
        ("recipes/clip_pairs_cpu.py", call): "into the folder that the user named"
        for call in (
            "tarfile.open",
            "tokenizer.save",
            "(folder / 'tokenizer_config.json').write_text",
            "folder.mkdir",
            "place.mkdir",
            "(place / f'{number:02d}.png').write_bytes",
        )
    },
    ("scaletrain_cli/unexpected.py", "open(number, ...)"): "a descriptor of mkstemp, which opens exclusively",
    (
        "scaletrain_cli/launch/node/processes.py",
        "Path('/proc/self/oom_score_adj').write_text",
    ): "a setting of this process in the kernel, and no file",
    ("scaletrain_cli/launch/backends/kubernetes/pod_output.py", "os.open"): "a file that the kubelet mounts",
    ("scaletrain_cli/mirror/stores.py", "os.link"): "fails if the name is taken; to a draft made anew",
    ("scaletrain_cli/launch/code.py", "shutil.copy2"): "into a folder of TemporaryDirectory, mode 0700",
    ("scaletrain_cli/launch/code.py", "Path(scratch, 'info').mkdir"): "within the same folder",
    (
        "scaletrain_cli/engine/checkpoint/export.py",
        "save_file",
    ): "the library's writer, in a folder made anew under a random name",
    ("scaletrain_cli/engine/data/row_writing.py", "path.open"): "exclusively, in the staging folder of a dataset",
    ("scaletrain_cli/hub/client.py", "draft.symlink_to"): "fails if the random name exists; to a blob of the cache",
    ("scaletrain_cli/hub/client.py", "os.link"): "the same",
    ("scaletrain_cli/launch/drill.py", "(folder / 'datasets').symlink_to"): "in a folder made anew, to its own",
}
_READERS = "scaletrain_cli/engine/data/reader_processes.py"
_BETWEEN_OWN = "between a rank and its own children, over a socket that no other process has; never from a file"
MAY_LOAD = {
    **{
        (_READERS, name): _BETWEEN_OWN
        for name in ("import pickle", "pickle.PickleBuffer", "pickle.dumps", "pickle.loads")
    },
    ("scaletrain_cli/worker/position.py", "import pickle"): "of torch's flight recorder in the same process",
    ("scaletrain_cli/worker/position.py", "pickle.loads"): "the same; never from a file or another process",
    ("scaletrain_cli/engine/metrics/out_of_memory.py", "import pickle"): "to dump for torch's viewer, never to load",
    ("scaletrain_cli/engine/metrics/out_of_memory.py", "pickle.dump"): "what pytorch.org/memory_viz reads",
    (
        "scaletrain_cli/launch/backends/slurm/probe.py",
        "import submitit",
    ): "composes and sends the batch script alone; pickles in submit(), which is not called",
    ("scaletrain_cli/launch/backends/slurm/probe.py", "submitit.SlurmExecutor"): "the same",
}
_UNPICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "submitit"}
_COPIES = {"copy", "copy2", "copyfile", "copytree", "move", "unpack_archive"}
_TORCH_LOADERS = {"torch.load", "torch.jit.load", "torch.package.PackageImporter", "torch.hub.load"}
_KEYWORDS = {"weights_only", "allow_pickle", "trust_remote_code", "Loader", "typ"}
_OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


def calls(nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    return (node for node in nodes if isinstance(node, ast.Call))


def given(call: ast.Call, name: str, position: int) -> ast.expr | None:
    named = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    return named if named is not None else call.args[position] if len(call.args) > position else None


def writes(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and call of everything that opens, creates or copies a file by name."""
    for call in calls(nodes):
        name = dotted(call.func)
        attribute = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name == "os.open":
            path, flags = (ast.unparse(argument) for argument in call.args[:2])
            if path != "os.devnull" and any(flag in flags for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "flags")):
                yield call.lineno, ast.unparse(call.func)
        elif name == "open" or (attribute == "open" and name != "os.fdopen"):
            if given(call, "fileobj", 9) is not None:
                continue  # an archive in memory
            if name == "open":
                path = ast.unparse(call.args[0])
                mode, shown = given(call, "mode", 1), f"open({path}, ...)"
            else:  # Path.open has the mode first, tarfile.open and gzip.open have it second
                module = name.partition(".")[0] in ("tarfile", "gzip", "bz2", "lzma", "zipfile", "codecs", "io")
                mode, shown = given(call, "mode", 1 if module else 0), ast.unparse(call.func)
            if isinstance(mode, ast.Constant):
                if set("wax+") & set(str(mode.value)):
                    yield call.lineno, shown
            elif mode is not None and (name == "open" or "mode" in ast.unparse(mode)):  # else no file: a sealed box
                yield call.lineno, shown
        elif (
            attribute in ("write_text", "write_bytes", "touch", "mkdir", "makedirs", "symlink_to", "hardlink_to")
            or (name.startswith("shutil.") and attribute in _COPIES)
            or name in ("tempfile.mktemp", "os.mkfifo", "os.mknod", "os.symlink", "os.link")
            or (attribute in ("extract", "extractall") and given(call, "filter", 9) is None)
            or name in ("tokenizer.save", "save_file", "np.save", "numpy.save", "np.savez")
            or (name == "torch.save" and ast.unparse(call.args[1]) != "file")  # what is open already
        ):
            yield call.lineno, ast.unparse(call.func)
        elif name in ("np.memmap", "numpy.memmap"):
            mode = given(call, "mode", 2)
            if not (isinstance(mode, ast.Constant) and mode.value in ("r", "c")):
                yield call.lineno, ast.unparse(call.func)
    for node in nodes:  # a file action of posix_spawn
        if isinstance(node, ast.Tuple) and node.elts and dotted(node.elts[0]) == "os.POSIX_SPAWN_OPEN":
            opened = ast.unparse(node.elts[3]) != "os.O_RDONLY"
            yield from [(node.lineno, "os.POSIX_SPAWN_OPEN")] * opened


def loads(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and statement of everything that loads objects by running code in the data."""
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        yield from ((node.lineno, f"import {name}") for name in names if name.partition(".")[0] in _UNPICKLERS)
    for call in calls(nodes):
        name = dotted(call.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg in _KEYWORDS}
        if (
            name.partition(".")[0] in _UNPICKLERS
            or (name in _TORCH_LOADERS and keywords.get("weights_only") != "True")
            or keywords.get("weights_only", "True") != "True"
            or keywords.get("allow_pickle", "False") != "False"
            or keywords.get("trust_remote_code", "False") != "False"
            or (
                name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load") and "Safe" not in keywords.get("Loader", "")
            )
            or (name in ("YAML", "ruamel.yaml.YAML") and keywords.get("typ") in ("'unsafe'", "'base'"))
            or name.rpartition(".")[2] in _OBJECT_COLLECTIVES
            or name in ("eval", "exec")
        ):
            yield call.lineno, ast.unparse(call.func)


def sources() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *(PROJECT / "recipes").rglob("*.py")])


def offences(rule: object, allowed: dict[tuple[str, str], str]) -> tuple[list[str], set[tuple[str, str]]]:
    found, used = [], set()
    for path in sources():
        file = str(path.relative_to(PROJECT))
        if file == HOME:
            continue
        for line, what in rule(nodes_of(path)):  # type: ignore[operator]
            if (file, what) in allowed:
                used.add((file, what))
            else:
                found.append(f"{file}:{line} {what}")
    return found, used


def test_every_file_is_opened_for_writing_through_safe_files() -> None:
    found, used = offences(writes, MAY_WRITE)
    assert not found, "use scaletrain_cli.safe_files:\n" + "\n".join(found)
    assert used == set(MAY_WRITE), "exceptions that nothing needs any more"


def test_no_format_that_can_run_code_is_loaded() -> None:
    found, used = offences(loads, MAY_LOAD)
    assert not found, "use JSON or safetensors:\n" + "\n".join(found)
    assert used == set(MAY_LOAD), "exceptions that nothing needs any more"


def test_few_private_functions_of_three_lines_are_called_once() -> None:
    found = [f"{path.relative_to(PROJECT)}: {name}" for path in sources() for name in small_helpers(nodes_of(path))]
    assert len(found) <= MOST_SMALL_HELPERS, "write them where they are called:\n" + "\n".join(found)


def test_a_variable_is_named_by_what_it_holds() -> None:
    vague = [
        f"{path.relative_to(PROJECT)}:{node.lineno} {node.id}"
        for path in PACKAGE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in ("found", "each")
    ]
    assert len(vague) <= MOST_VAGUE_NAMES, "name what was found, or what each one is:\n" + "\n".join(vague)


def small_helpers(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the private functions of a file with a body of at most three lines and one use, which is a call."""
    small, uses, calls = [], Counter[str](), Counter[str]()
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            body = node.body[ast.get_docstring(node, clean=False) is not None :]
            lines = (body[-1].end_lineno or 0) - body[0].lineno if body else 0
            if re.match("_[a-z]", node.name) and lines < 3 and not node.decorator_list:
                small.append(node.name)
        elif isinstance(node, ast.Name | ast.Attribute):
            uses[node.id if isinstance(node, ast.Name) else node.attr] += 1
        elif isinstance(node, ast.Call):
            calls[dotted(node.func).rpartition(".")[2]] += 1
    return (name for name in small if uses[name] == calls[name] == 1)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def _a(): return 1\n_a()", ["_a"]),
        ("def _a(): return 1\n_a(), _a()", []),
        ("def _a(): return 1\nuse(_a)", []),
        ("def _a():\n  f()\n  f()\n  f()\n  f()\n_a()", []),
        ("class A:\n  def _a(self):\n    'text'\n    return 1\n  def b(self): self._a()", ["_a"]),
    ],
)
def test_small_helpers_are_detected(source: str, found: list[str]) -> None:
    assert list(small_helpers(ast.walk(ast.parse(source)))) == found


@pytest.mark.parametrize(
    "source",
    [
        "open(path, 'w')",
        "open(path, mode='a')",
        "open(path, mode)",
        "path.open('wb')",
        "path.open('r+b')",
        "path.write_text('x')",
        "path.write_bytes(b'x')",
        "path.touch()",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "shutil.copy(a, b)",
        "tarfile.open(path, 'w:gz')",
        "archive.extractall(folder)",
        "np.save(path, values)",
        "np.memmap(path, mode='r+')",
        "torch.save(state, path)",
        "path.mkdir(exist_ok=True)",
        "actions = [(os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT, 0o644)]",
    ],
)
def test_calls_that_write_files_are_detected(source: str) -> None:
    assert list(writes([*ast.walk(ast.parse(source))]))


@pytest.mark.parametrize(
    "source",
    [
        *("open(path)", "path.open('rb')", "path.open(encoding='utf-8')", "os.open(path, os.O_RDONLY)"),
        *("tarfile.open(archive, 'r:gz')", "tarfile.open(fileobj=memory, mode='w')", "np.memmap(path, mode='r')"),
    ],
)
def test_opening_a_file_for_reading_is_not_reported(source: str) -> None:
    assert not list(writes([*ast.walk(ast.parse(source))]))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import cloudpickle",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "dist.broadcast_object_list(items)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "exec(text)",
    ],
)
def test_each_call_that_can_run_loaded_code_is_found(source: str) -> None:
    assert list(loads([*ast.walk(ast.parse(source))]))
