"""A damaged document of a run costs the row of its run, and is named: in every verb, whatever stands in its place."""

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.attempts import request_stop
from scaletrain_cli.launch.node.record import NodeRecord, RankRecord, write_node_record
from scaletrain_cli.launch.run_status import DAMAGED, RunStatus
from scaletrain_cli.launch.status import run_statuses
from scaletrain_cli.reasons import recorded
from scaletrain_cli.report.reading import read_run_report
from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.evaluations import Evaluation, write_evaluation, write_validation
from scaletrain_cli.rundir.goodput import Ledger, write_ledger
from scaletrain_cli.rundir.journal import append_line, mark_diagnosis, record_event
from scaletrain_cli.rundir.measured import Figure, Measured, StageFigures, write_measured
from scaletrain_cli.rundir.mirror_state import MirrorState, mark_restored, write_mirror_state
from scaletrain_cli.rundir.paths import RunDir, SweepPlace, write_sweep_place
from scaletrain_cli.rundir.preparation import PreparationJob, record_job
from scaletrain_cli.rundir.profiles import Profile, profile_folder, rank_file, write_profile
from scaletrain_cli.rundir.record import REVISION_SCHEMA
from scaletrain_cli.worker.failures import Failure, write_failure
from tests.cli.command_line import scaletrain
from tests.cli.every_command import OF_A_RUN, command_line, start_nothing
from tests.cli.prepared_runs import prepare

OWN_ERRORS = {0, 1, 2, 3, 4, 5, 75}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs root with the run r1, which has every document that a local run may have, and the run r2."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALETRAIN_RUNS", str(root))
        run = RunDir(prepare("failed", "r1", None, "checkpoint.mirror.to=/mirror"))
        prepare("finished", "r2")
        add_documents(run)
    return root


def add_documents(run: RunDir) -> None:
    first = json.loads(run.record.read_text())
    revision = {key: first[key] for key in ("spec", "plan", "code")}
    (run.path / "revisions").mkdir()
    write_document(run.path / "revisions" / "0001.json", {"schema": REVISION_SCHEMA, "overrides": ["a=1"], **revision})
    submission = {"scheduler": "local", "job_id": "7", "submitted": 1.7e9, "first_attempt": 1, "revision": 1}
    write_document(run.path / "submission.json", {"state": "submitted", **submission})
    write_sweep_place(run, SweepPlace("s", 1, 2, ("training.steps=2",)))
    write_ledger(run, Ledger(1, 1.7e9, 1.7e9 + 9, True, 3, {"step": 3.0}))
    write_measured(run, Measured(1, 1, 2, "cpu", 0, (StageFigures(0, {"parameters": Figure(10, 10)}),)))
    rank = RankRecord(0, 1000, 1.7e9, 1.7e9 + 5, 1)
    write_node_record(run, 1, NodeRecord("node-0000-n", "n", 0, 999, 5, 1.7e9, (rank,), 1.7e9 + 5, 1, 0))
    write_failure(run, 1, "rank-00000", Failure(0, "crash", "it was so", 1))
    write_mirror_state(run, MirrorState("/mirror", 1, 1.7e9, [2], 2, 1.7e9))
    mark_restored(run, "")
    request_stop(run, 1, "growth", recorded("more nodes are free"))
    request_stop(run, 1, "idle", recorded("it does nothing"))
    mark_diagnosis(run, 1, is_over=True)
    write_evaluation(run, Evaluation(2, "r1", "done", 1.7e9, {"task/acc": 0.5}))
    write_validation(run, 2, {"top1": 0.5}, {"classes": [{"class": "a", "samples": 1, "top1": 0.5}]})
    (run.path / "preparation").mkdir(exist_ok=True)
    record_job(run.path / "preparation", PreparationJob("local", "6", "", 1))
    folder = profile_folder(run, 1, 2)
    write_profile(folder, Profile("", 1, "recorded", 2, 3, [0], "cpu", {"compute": 1.0}))
    write_document(rank_file(folder, 0), {"causes": {"compute": 1.0}, "step_seconds": 1.0})
    append_line(run.metrics, {"step": 3, "validation_loss": 2.0, "time": 1.7e9})
    for event in ("started", "resumed"):
        record_event(run, event, attempt=1, step=0)
    record_event(run, "rolled-back", from_step=3, to_step=2, skip=[3, 3], lost_steps=1, attempt=1)
    record_event(run, "finding", attempt=1, step=3, code="diagnosis.x", params={}, severity="note", subject="")
    record_event(run, "stragglers", rank=1, seconds=2.0, others_seconds=1.0)
    record_event(run, "idle", seconds=3.0, ends_in_seconds=3.0, timeout=3600.0, measured="GPU")


@pytest.fixture
def root(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(template, tmp_path / "runs", symlinks=True)
    monkeypatch.chdir(tmp_path)
    start_nothing(monkeypatch)
    return tmp_path / "runs"


def documents(root: Path) -> list[Path]:
    return sorted(path for path in (root / "r1").rglob("*") if path.suffix in (".json", ".jsonl"))


def emptied(path: Path, content: bytes = b"") -> None:
    path.write_bytes(content)


def sparse(path: Path) -> None:
    """Twenty gigabytes of zeros, which take no place on the disk and all of the memory of who reads them."""
    os.truncate(path, 20 << 30)


def forbidden(path: Path) -> None:
    """A file that this user cannot open: root may open all, so a link that leads to itself stands for it."""
    path.unlink()
    path.symlink_to(path.name)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


WAYS: dict[str, Callable[[Path], None]] = {
    "removed": Path.unlink,
    "empty": emptied,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "zeros": lambda path: emptied(path, bytes(4096)),
    "null": lambda path: emptied(path, b"null"),
    "of another schema": lambda path: emptied(path, b'{"schema": 3}\n'),
    "deep": lambda path: emptied(path, b"[" * 100_000),
    "sparse": sparse,
    "forbidden": forbidden,
    "a FIFO": fifo,
    "a folder": folder,
}


def check_rows(root: Path, path: Path) -> None:
    """The run r2 is shown, and r1 is either shown or damaged with the name of its file."""
    rows = {row["run_id"]: row for row in scaletrain("list", "--json").data["runs"]}
    assert rows["r2"]["state"] == "finished"
    assert scaletrain("status", "--cluster", "--scheduler", "local").code == 0
    if rows.get("r1", {"state": ""})["state"] == DAMAGED:
        assert str(path.relative_to(root)) in rows["r1"]["error"]["message"]


def damage_each(way: str, root: Path, template: Path, share: int, verbs_each: int) -> None:
    """Damage one of ``share`` documents of r1 after the other; all verbs of a run take turns with them."""
    number = list(WAYS).index(way)
    verbs = itertools.cycle(OF_A_RUN[number:] + OF_A_RUN[:number])
    for path in documents(root)[number % share :: share]:
        WAYS[way](path)
        check_rows(root, path)
        for words in itertools.islice(verbs, verbs_each):
            ended = scaletrain(*command_line(words))
            assert ended.code in OWN_ERRORS, (words, ended)
        shutil.rmtree(root / "r1", ignore_errors=True)  # the verb may have been rm
        shutil.copytree(template / "r1", root / "r1", symlinks=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_document_is_named_and_hides_no_other_run(way: str, root: Path, template: Path) -> None:
    damage_each(way, root, template, share=6, verbs_each=1)


@pytest.mark.parametrize("name", ["attempts", "checkpoints", "revisions", "attempts/0001/nodes", "attempts/0001/logs"])
def test_a_folder_that_cannot_be_listed_is_named_and_hides_no_other_run(name: str, root: Path) -> None:
    path = root / "r1" / name
    shutil.rmtree(path)
    path.symlink_to(path.name)  # root may list all folders, but for one that is a link to itself
    check_rows(root, path)
    for words in (["status", "r1"], ["logs", "r1"], ["report", "r1", "--json"]):
        ended = scaletrain(*words)
        assert ended.code == 0 or (ended.code == 2 and str(path) in ended.err), (words, ended)
    assert scaletrain("status", "r1").code == (0 if name.endswith("logs") else 2)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_each_verb_survives_each_damage_of_each_document(way: str, root: Path, template: Path) -> None:
    damage_each(way, root, template, share=1, verbs_each=len(OF_A_RUN))


VALUES = (None, "x", -1, 10**18, 10**400, 1e300, True, [], {}, [None], {"a": 1}, "\ud800\0")


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a JSON value."""
    yield above
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*above, key))


def with_value(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    changed = value.copy()
    changed[place[0]] = with_value(value[place[0]], place[1:], new)
    return changed


def check_values(root: Path, step: int) -> None:
    """Put a value of another type in place of every ``step``-th value of each document and line of r1."""
    count = 0
    for path in documents(root):
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        every = [(line, place, value) for line in lines for place in places(json.loads(line)) for value in VALUES]
        for line, place, value in every[count % step :: step]:
            path.write_text(text.replace(line, json.dumps(with_value(json.loads(line), place, value)), 1))
            count += 1
            damaged, other = run_statuses([RunDir(root / "r1"), RunDir(root / "r2")])
            assert isinstance(other, RunStatus)
            assert isinstance(damaged, RunStatus) or str(path) in str(damaged), (place, value, damaged)
            with contextlib.suppress(UsageError):
                read_run_report(RunDir(root / "r1"))
            for words in (["status", "r1"], ["watch", "r1", "--once"], ["explain", "r1"])[count % 3 :][:1]:
                assert scaletrain(*words).code in (0, 2), (path, place, value)
        path.write_text(text)
    assert count > 20


def test_a_value_of_another_type_is_named_and_hides_no_other_run(root: Path) -> None:
    check_values(root, step=997)


@pytest.mark.long
def test_any_value_of_another_type_is_named_and_hides_no_other_run(root: Path) -> None:
    check_values(root, step=7)
