"""The data of a run are prepared before its gang starts: in the foreground or by a job, unless they are there."""

import json
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.api import prepare_submission
from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.launch import preparation
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.preparation import Choice, plan_preparation, queue_preparation
from scaletrain_cli.rundir.shared_datasets import datasets_file, read_entries
from tests.launch.conftest import ENGINE, make_spec

SLURM = ("cluster.scheduler=slurm",)
PODS = ("cluster.scheduler=kubernetes",)
IMAGES = ("model={family: resnet, hidden_sizes: [64], depths: [1]}",)
TASKS = "cluster.slurm.preparation.tasks=7"


@pytest.fixture(autouse=True)
def no_preparation() -> None:
    """Replace the fixture of this folder: these tests ask how data are prepared."""


@pytest.mark.parametrize(
    ("settings", "answer", "choice", "where", "tasks", "code"),
    [
        (SLURM, {"prepared": True, "bytes": 0}, "auto", "nothing", 0, "is-prepared"),
        (SLURM, {"prepared": False, "bytes": 10_000_000, "seconds": 6.7}, "auto", "here", 0, "here"),
        (SLURM, {"prepared": False, "bytes": 400_000_000_000, "seconds": 267e3}, "auto", "job", 38, "job"),
        (SLURM, {"prepared": False, "bytes": 400_000_000_000, "seconds": 267e3}, "now", "here", 0, "here-as-chosen"),
        (SLURM, {"prepared": False, "bytes": 10_000_000, "seconds": 6.7}, "job", "job", 1, "job-as-chosen"),
        ((*SLURM, TASKS), {"prepared": False, "bytes": 9, "seconds": 1e-5}, "job", "job", 7, "job-as-chosen"),
        ((), {"prepared": False, "bytes": 400_000_000_000, "seconds": 267e3}, "auto", "here", 0, "only-here"),
        (("code.engine=my_program",), {}, "auto", "nothing", 0, "is-prepared"),
        ((*PODS, "cluster.kubernetes.preparation.tasks=5"), {}, "auto", "job", 5, "job-before"),
    ],
)
def test_data_are_prepared_here_or_by_a_job_by_the_time_that_it_takes(
    monkeypatch: pytest.MonkeyPatch,
    settings: tuple[str, ...],
    answer: dict[str, Any],
    choice: Choice,
    where: str,
    tasks: int,
    code: str,
) -> None:
    monkeypatch.setattr(preparation, "run_engine_command", lambda *_, **__: answer)
    plan = plan_preparation(make_spec(*settings), Path("/runs"), choice)
    assert (plan.where, plan.tasks, plan.why.code) == (where, tasks, f"preparation.{code}")


def test_what_this_machine_cannot_see_is_prepared_by_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = (
        "cluster.scheduler=slurm",
        "cluster.slurm.container={image: /images/a.sqsh}",
        "data.source=/data/web.jsonl",
    )
    plan = plan_preparation(make_spec(*inside), Path("/runs"))
    assert (plan.where, plan.tasks) == ("job", 1)
    assert "/data/web.jsonl is in the container" in str(plan.why)
    with pytest.raises(UsageError, match=r"in the container\. Use --prepare job"):
        plan_preparation(make_spec(*inside), Path("/runs"), "now")
    monkeypatch.setattr(preparation, "find_spec", lambda name: None)
    assert "tokenizers not installed here" in str(plan_preparation(make_spec(*SLURM), Path("/runs")).why)
    with pytest.raises(UsageError, match="does not see the runs root of the nodes"):
        plan_preparation(make_spec(*PODS), Path("/runs"), "now")
    with pytest.raises(UsageError, match="cannot run a preparation job"):
        plan_preparation(make_spec(), Path("/runs"), "job")
    with pytest.raises(UsageError, match=r"cannot run a preparation job\. Run the command without --submit"):
        queue_preparation(make_spec(), None)


@pytest.mark.parametrize(
    ("source", "missing", "settings"),
    [
        ("shards", "pillow", IMAGES),
        ("sklearn-digits", "scikit-learn", IMAGES),
        ("tables", "pyarrow", IMAGES),
        ("https://a.b/{0..9}.tar", "obstore", IMAGES),
        ("tables/data", "pyarrow", ()),
        ("python-stdlib", "py3langid", ("data.prepare=[{step: language, keep: [en]}]",)),
    ],
)
def test_data_whose_library_is_not_installed_here_are_prepared_by_a_job(
    source: str, missing: str, settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("shards/a.tar", "tables/data/a.parquet"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"")
    absent = {"pillow": "PIL", "scikit-learn": "sklearn"}.get(missing, missing)
    monkeypatch.setattr(preparation, "find_spec", lambda name: None if name == absent else name)
    path = source if "://" in source or "-" in source else tmp_path / source
    plan = plan_preparation(make_spec(*SLURM, *settings, f"data.source={path}"), tmp_path / "runs")
    assert plan.where == "job"
    assert f"{missing} not installed here" in str(plan.why)


def test_a_submission_prepares_its_data(tmp_path: Path, forked_jobs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBackend.__init__, "__defaults__", (ENGINE,))
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path / "runs"))
    corpus = tmp_path / "web.jsonl"
    rows = [json.dumps({"text": f"alpha beta gamma {number} " * 20}) for number in range(60)]
    corpus.write_text("\n".join([*rows * 30, "not JSON", ""]), encoding="utf-8")  # beyond what is looked at before
    settings = ("data.tokenizer.vocab_size=300", "model.vocab_size=300", "cluster.gpus_per_node=1")
    spec = make_spec(*settings, f"data.source={corpus}")
    prepared = prepare_submission(spec, run_id="r1")
    said: list[str] = []
    with pytest.raises(ScaletrainError, match=r"web\.jsonl:1801"):
        prepared.submit(on_preparation=said.append)
    assert said[0] == "the data are not prepared: this is done first, on this machine"
    assert not (tmp_path / "runs" / "r1").exists()
    corpus.write_text("\n".join(rows), encoding="utf-8")
    done = prepare_submission(spec, run_id="r1").submit(on_preparation=said.append)
    assert done.created
    (dataset,) = (tmp_path / "runs" / "datasets").glob("*/dataset.json")
    (recorded,) = read_entries(datasets_file(done.run.directory))
    assert (recorded["source"], recorded["folder"]) == ("source", dataset.parent.name)
    assert plan_preparation(spec, tmp_path / "runs").why.code == "preparation.is-prepared"
    assert done.run.wait().state == "finished"
