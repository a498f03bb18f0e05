"""No verb prints a traceback if a system call fails, a file vanishes, a package is missing or Ctrl-C is pressed."""

from __future__ import annotations

import builtins
import errno
import gc
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scaletrain_cli.extras import EXTRAS
from scaletrain_cli.rundir.paths import list_runs, runs_root
from tests.cli.command_line import BUG, PROJECT, SMALL, Ended, scaletrain
from tests.cli.every_command import ALL, command_line, start_nothing

WORDS = sorted(ALL)
OURS = str(PROJECT / "scaletrain_cli")
patient = settings(suppress_health_check=list(HealthCheck))
verbs = st.sampled_from(WORDS)
states = st.sampled_from(["finished", "failed", "running", "damaged"])


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start_nothing(monkeypatch)
    monkeypatch.setattr(
        "scaletrain_cli.launch.backends.local.backend.LocalBackend.cancel", lambda self, run, record: None
    )
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def fresh(root: Path, tmp_path: Path) -> None:
    """A copy of the runs root for one example."""
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    shutil.copytree(root, tmp_path / "runs", symlinks=True)
    for left in tmp_path.glob("*.yaml"):
        left.unlink()


def check(ended: Ended, words: tuple[str, ...]) -> None:
    """A documented end: a message and no traceback; with --json one document, unless it could not be written."""
    assert "Traceback" not in ended.err + ended.out, ended
    assert BUG not in ended.err, ended
    assert ended.code in {0, 1, 2, 3, 4, 5, 130}, ended
    if ended.out.strip() and words:
        assert json.loads(ended.out)["ok"] == (ended.code == 0), ended


def check_nothing_half_made(tmp_path: Path) -> None:
    """Every run directory is whole, and no draft of a file is left."""
    for run in list_runs():
        assert run.record.stat().st_size > 0
    drafts = [path for path in runs_root().rglob("*.tmp") if "step-" not in path.name and "attempt-" not in path.name]
    assert drafts == []
    specs = list(tmp_path.glob("*.yaml"))
    assert all(spec.stat().st_size > 500 for spec in specs), specs


class CtrlC:
    """Raises KeyboardInterrupt at the n-th line of the package that runs, once."""

    def __init__(self, line: int) -> None:
        self.left, self.at = line, ""

    def __enter__(self) -> CtrlC:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        # What runs while the interpreter is started, or frees memory, cannot end in a message.
        ours = name.startswith(OURS) and frame.f_code.co_name not in ("main", "__del__")
        return self._line if ours and threading.current_thread() is threading.main_thread() else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line


@pytest.fixture
def collected() -> Iterator[None]:
    """Collect the frames of a test at its end, so that their warnings belong to it and not to the next test."""
    yield
    gc.collect()


# Python may raise KeyboardInterrupt between the opening of a file and the block that closes it.
@pytest.mark.usefixtures("collected")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@patient
@given(words=verbs, state=states, line=st.integers(1, 3000), as_json=st.booleans())
def test_ctrl_c_at_any_line_ends_with_130_and_leaves_no_partial_files(
    words: tuple[str, ...], state: str, line: int, as_json: bool, prepared: dict[str, Path], tmp_path: Path
) -> None:
    fresh(prepared[state], tmp_path)
    with CtrlC(line) as pressed:
        ended = scaletrain(*command_line(words), *(["--json"] if as_json else []))
    if pressed.at:
        assert ended.code == 130, (pressed.at, ended)
    check(ended, words if as_json else ())
    check_nothing_half_made(tmp_path)


FAULTS = [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EROFS, errno.ENOENT, errno.ESTALE, errno.EMFILE, errno.EDQUOT]
CALLS = "open write mkdir rename replace fsync stat lstat scandir listdir unlink access".split()


class Refusing:
    """Makes the n-th of the calls of this kind that the package causes fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str, nth: int, number: int) -> None:
        self.left, self.number, self.failed = nth, number, ""
        places: list[Any] = [builtins, io, os] if call == "open" else [os]
        for place in places:
            monkeypatch.setattr(place, call, self._wrapped(getattr(place, call)))

    def _wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if not self.failed and self._is_of_the_package():
                self.left -= 1
                if self.left == 0:
                    self.failed = "".join(traceback.format_stack(limit=6))
                    name = arguments[0] if arguments and isinstance(arguments[0], str | os.PathLike) else None
                    raise OSError(self.number, os.strerror(self.number), None if name is None else os.fspath(name))
            return real(*arguments, **options)

        return call

    @staticmethod
    def _is_of_the_package() -> bool:
        frame: FrameType | None = sys._getframe(2)
        for _ in range(6):
            if frame is None or "importlib" in frame.f_code.co_filename:
                return False
            if frame.f_code.co_filename.startswith(OURS):
                return True
            frame = frame.f_back
        return False


@settings(patient, max_examples=max(60, patient.max_examples))  # of many pairs of a verb and a call
@given(words=verbs, state=states, call=st.sampled_from(CALLS), nth=st.integers(1, 25), number=st.sampled_from(FAULTS))
def test_every_failed_system_call_gives_an_error_message(
    words: tuple[str, ...], state: str, call: str, nth: int, number: int, prepared: dict[str, Path], tmp_path: Path
) -> None:
    fresh(prepared[state], tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        refusing = Refusing(patch, call, nth, number)
        ended = scaletrain(*command_line(words), "--json", expect_bug=True)
    assert BUG not in ended.err, (refusing.failed, ended)
    check(ended, words)


def in_child(limit: Callable[[], None], words: tuple[str, ...]) -> Ended:
    """Run a command in a forked process that has been limited."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.close(reading)
            limit()
            ended = scaletrain(*command_line(words), "--json", expect_bug=True)
            os.write(writing, json.dumps([ended.code, ended.out[-20_000:], ended.err[-20_000:]]).encode())
        except BaseException:
            os.write(writing, json.dumps([70, "", "Traceback " + traceback.format_exc()[-8000:]]).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        code, out, err = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return Ended(code, out, err)


def nobody() -> None:
    os.setgroups([])
    os.setegid(65534)
    os.seteuid(65534)


def full_disk() -> None:
    """Limit the size of files: the kernel fails a write beyond it."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))


def no_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 1, 4096))


LIMITS = (nobody, full_disk, no_files)
# Verbs that write a file in a runs root with a failed run.
WRITING = {
    *(("checkpoint", "export"), ("checkpoint", "prune"), ("data", "prepare"), ("data", "stats"), ("data", "upload")),
    *(("image",), ("init",), ("nodes", "clear"), ("report",), ("resume",), ("submit",), ("train",)),
}


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.__name__)
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.long)], ids=["a third", "every verb"])
def test_a_failed_system_call_gives_an_error_message(
    limit: Callable[[], None], step: int, prepared: dict[str, Path], tmp_path: Path
) -> None:
    if limit is nobody and os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    tmp_path.chmod(0o755)
    assert set(WORDS) >= WRITING
    always = [words for words in WORDS if limit is full_disk and words in WRITING]
    others = [words for words in WORDS if words not in always]
    for words in [*always, *others[LIMITS.index(limit) % step :: step]]:
        fresh(prepared["failed"], tmp_path)
        if limit is nobody:  # who may not read this interpreter's library: load what the verb needs before
            scaletrain(*command_line(words), "--json")
            fresh(prepared["failed"], tmp_path)
        before = files(tmp_path)
        ended = in_child(limit, words)
        assert "Traceback" not in ended.err, (words, ended.err)
        assert BUG not in ended.err, (words, ended.err)
        assert ended.code in (0, 1, 2, 3, 4, 5), (words, ended)
        if limit is full_disk:
            assert {path for path in files(tmp_path) - before if path.suffix != ".lock"} == set(), words


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


ROOTS = ("a file", "below a file", "a loop", "not UTF-8", "gone")


@pytest.mark.parametrize("where", ROOTS)
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.long)], ids=["each fifth verb", "every verb"])
def test_an_unusable_root_is_an_error(where: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "cwd").mkdir()
    roots = {"a file": "file", "below a file": "file/runs", "a loop": "loop", "not UTF-8": os.fsdecode(b"r\xff")}
    if where == "gone":
        monkeypatch.delenv("SCALETRAIN_RUNS")
        monkeypatch.chdir("cwd")
        os.rmdir(tmp_path / "cwd")
    else:
        monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path / roots[where]))
    for words in WORDS[ROOTS.index(where) % step :: step]:
        ended = scaletrain(*command_line(words), "--json", expect_bug=True)
        assert BUG not in ended.err, (words, ended.err)
        check(ended, words)
    os.chdir(tmp_path)


CORE_ONLY = """
import contextlib, io, json, os, sys
core, project, lines = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
sys.path[:] = [*[folder for folder in sys.path if "site-packages" not in folder], core, project]
from scaletrain_cli.__main__ import main
for words in lines:
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            code = end.code
    print(json.dumps([words, code, out.getvalue(), err.getvalue()]))
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def core_packages(folder: Path) -> None:
    """Links to what `pip install .` brings without extras, and to nothing else."""
    project = (PROJECT / "pyproject.toml").read_text(encoding="utf-8").split("\ndependencies = [")[1].split("\n]")[0]
    wanted, seen = re.findall(r'^    "([\w.-]+)', project, flags=re.MULTILINE), set()
    while wanted:
        try:
            found = distribution(wanted.pop())
        except PackageNotFoundError:  # of another platform
            continue
        if found.name in seen:
            continue
        seen.add(found.name)
        needs = [need for need in found.requires or () if "extra ==" not in need]
        wanted += [re.split(r"[ ;<>=!~\[(]", need)[0] for need in needs]
        for top in {str(path).partition("/")[0] for path in found.files or () if not str(path).startswith("..")}:
            if not (folder / top).is_symlink():
                (folder / top).symlink_to(Path(str(found.locate_file(top))))


def test_without_extras_every_verb_works_or_names_its_extra(tmp_path: Path, prepared: dict[str, Path]) -> None:
    core = tmp_path / "core"
    core.mkdir()
    core_packages(core)
    fresh(prepared["failed"], tmp_path)
    needing = {
        ("train", *command_line(("train",))[1:]): "train",
        ("submit", str(SMALL), "--yes"): "train",
        ("resume", "r1", "--yes"): "train",
        ("data", "prepare", str(SMALL)): "train",
        ("checkpoint", "export", "r1", "-o", "out"): "train",
        ("preflight", str(SMALL), "--yes"): "train",
        ("rehearse", str(SMALL), "--yes"): "train",
        ("drill", "--yes"): "train",
        ("plan", str(SMALL), "--plot", "a.svg"): "plot",
        ("plan", str(SMALL), "--live-prices", "--set", "cluster.gpu=h100-sxm-80gb"): "prices",
    }
    working = [("submit", str(SMALL), "--dry-run"), ("status", "--cluster"), ("doctor",), ("plan", str(SMALL), "--all")]
    working += [tuple(command_line(words)) for words in WORDS if tuple(command_line(words)) not in needing]
    lines = [[*words, "--json"] for words in (*needing, *working) if words[0] != "rm"]
    command = [sys.executable, "-S", "-c", CORE_ONLY, str(core), str(PROJECT), json.dumps(lines)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *answers, loaded = [json.loads(line) for line in done.stdout.splitlines()]
    assert not {module for modules in EXTRAS.values() for module in modules} & set(loaded)
    for words, code, out, err in answers:
        assert "Traceback" not in err + out, (words, err)
        assert BUG not in err, (words, err)
        data = json.loads(out)
        extra = needing.get(tuple(words[:-1]))
        if extra is not None:
            reported = json.dumps(data["error"])
            assert code == 2, (words, err)
            assert f"'.[{extra}]'" in reported, (words, err)
            assert "pip install" in reported, (words, err)
        else:
            assert code in (0, 1, 2, 4), (words, err)


def test_closed_streams_print_no_traceback() -> None:
    program = f'"{sys.executable}" -m scaletrain_cli'
    lines = [
        f"{program} list >&-",
        f"{program} list --json >&- 2>&-",
        f"{program} validate nowhere 2>&-",
        f"LC_ALL=C PYTHONUTF8=0 {program} validate $'\\xff.yaml' --json",
    ]
    for line in lines:
        done = subprocess.run(["bash", "-c", line], cwd=PROJECT, capture_output=True)
        assert b"Traceback" not in done.stdout + done.stderr, (line, done.stderr)
        assert BUG.encode() not in done.stderr, (line, done.stderr)
        assert b"Exception ignored" not in done.stderr, (line, done.stderr)


def test_ctrl_c_during_import_prints_no_traceback() -> None:
    for nth in (1, 40, 400):
        program = (
            "import os, signal, sys\n"
            "class Press:\n"
            "    left = int(sys.argv.pop())\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        Press.left -= 1\n"
            "        if Press.left == 0:\n"
            "            os.kill(os.getpid(), signal.SIGINT)\n"
            "from scaletrain_cli.__main__ import main\n"
            "sys.meta_path.insert(0, Press())\n"
            f"sys.argv[1:] = ['plan', {str(SMALL)!r}]\n"
            "main()\n"
        )
        done = subprocess.run([sys.executable, "-c", program, str(nth)], cwd=PROJECT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (130, ""), done.stderr
