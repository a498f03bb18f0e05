"""Resuming with another size: what may change, what is rejected with which reason, and no change after a rejection."""

import contextlib
import functools
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest

from scaletrain_cli.errors import InfeasibleError, SchedulerError, SchedulerSilentError, UsageError
from scaletrain_cli.launch import resume as resumption
from scaletrain_cli.launch.job import read_submission
from scaletrain_cli.launch.replan import replan
from scaletrain_cli.launch.resume import resume
from scaletrain_cli.launch.submit import create_run, submit_run
from scaletrain_cli.plan import RunPlan, make_plan
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_record, revisions
from scaletrain_cli.spec import RunSpec, changed_keys
from tests.launch.conftest import MadeRun, make_spec
from tests.launch.test_resume import Cluster, attempt, commit, log_steps
from tests.launch.working_tree import WorkingTree


class Refusing(Cluster):
    """A back end that rejects a job, or does not answer, after it has read the run."""

    def __init__(self, error: type[SchedulerError] = SchedulerError) -> None:
        super().__init__()
        self.error = error
        self.seen: RunRecord | None = None

    def submit(self, run: RunDir, record: RunRecord) -> str:
        self.seen = read_record(run)
        assert not run.is_cancelled, "a job that starts at once would end at once"
        raise self.error("no such partition")


@functools.cache
def planned(*overrides: str) -> tuple[RunSpec, RunPlan]:
    spec = make_spec(*overrides)
    return spec, make_plan(spec)


def ended_run(*overrides: str, name: str = "mine") -> MadeRun:
    """Return a run with a real plan that trained to step 10 and was cancelled."""
    created = create_run(*planned(*overrides), name)
    made = MadeRun(created.run, created.record)
    submit_run(made.run, made.record, Cluster())
    attempt(made, 75, "cancelled")
    commit(made, 10)
    made.run.stop_file.touch()
    made.run.manual_stop_file.write_text("the disk is to be changed")
    return made


def test_a_resized_run_is_submitted_with_its_revision() -> None:
    made, cluster = ended_run(), Cluster()
    resume(made.run, resize=replan(made.run, ["cluster.gpus_per_node=4"]), scheduler=cluster)
    record = read_record(made.run)
    assert (record.revision, record.plan.layout.world_size) == (1, 4)
    submission = read_submission(made.run)
    assert submission.revision == 1
    assert made.events("submitted")[-1]["revision"] == 1
    assert not [*made.run.path.glob("cancelled*"), *made.run.path.glob("stop*")]


def test_earlier_overrides_stay_in_effect() -> None:
    made = ended_run()
    resume(made.run, resize=replan(made.run, ["cluster.gpus_per_node=4"]), scheduler=Cluster())
    resize = replan(made.run, ["checkpoint.every=7"])
    assert (resize.spec.world_size, resize.spec.checkpoint.every) == (4, 7)


def test_overrides_that_the_run_already_has_make_no_revision() -> None:
    made, cluster = ended_run(), Cluster()
    resume(made.run, resize=replan(made.run, ["cluster.gpus_per_node=2"]), scheduler=cluster)
    assert (revisions(made.run), cluster.submitted) == ([], 1)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.seed=7", "--set training.seed = 7: was 42, and what is trained cannot change."),
        ("training.global_batch_size=8", "training.global_batch_size = 8: was 4"),
        ("training.optimizer.name=lion", 'training.optimizer.name = "lion": was "adamw"'),
        ("training.precision=bf16", 'training.precision = "bf16": was "fp32"'),
        ("model.seq_len=16", "model.seq_len = 16: was 8"),
        ("data.source=other", 'data.source = "other": was "python-stdlib"'),
        ("name=other", 'name = "other": was "fake"'),
        ("evaluation.every=3", "evaluation.every = 3: was 500"),
        ("checkpoint.dir=/elsewhere", 'checkpoint.dir = "/elsewhere": the checkpoints of the run are in "auto".'),
    ],
)
def test_settings_that_change_what_is_trained_are_rejected(override: str, expected: str) -> None:
    made = ended_run()
    with pytest.raises(UsageError) as caught:
        replan(made.run, [override, "cluster.gpus_per_node=1"])
    assert caught.value.exit_code == 2
    assert [str(problem) for problem in caught.value.problems if expected in str(problem)]
    assert len(caught.value.problems) == 1


def test_every_forbidden_key_is_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        replan(ended_run().run, ["training.seed=7", "training.precision=bf16", "layout.zero_stage=1"])
    assert [problem.key for problem in caught.value.problems] == ["training.precision", "training.seed"]


@pytest.mark.parametrize(
    "override",
    [
        *("layout.zero_stage=1", "checkpoint.every=3", "guard.hang=5m", "restarts.crash=9", "tracking.log_every=2"),
        *("training.micro_batch_size=2", "env.EXTRA='1'", "cluster.grace_seconds=90"),
        *("training.optimizer.lr=1e-5", "training.schedule.warmup_steps=9", "training.gradient_clipping=0.5"),
    ],
)
def test_settings_that_act_on_later_steps_only_can_be_changed(override: str) -> None:
    assert len(replan(ended_run().run, [override]).changes) == 1


def test_checkpoints_that_were_copied_may_be_used_from_another_folder(tmp_path: Path) -> None:
    made = ended_run()
    override = f"checkpoint.dir={tmp_path}"
    with pytest.raises(UsageError, match="Copy the folder of the run there first"):
        replan(made.run, [override])
    shutil.copytree(made.run.checkpoints, tmp_path / made.run.run_id)
    assert replan(made.run, [override]).changes == {"checkpoint.dir": ('"auto"', json.dumps(str(tmp_path)))}


def test_an_invalid_override_names_the_option() -> None:
    with pytest.raises(UsageError) as caught:
        replan(ended_run().run, ["cluster.nodes=many"])
    assert str(caught.value.problems[0]).startswith("--set cluster.nodes = many: ")


def test_a_pinned_degree_without_a_layout_is_reported_with_a_remedy() -> None:
    made = ended_run("layout.data_parallel=2", "layout.tensor_parallel=1")
    with pytest.raises(InfeasibleError) as caught:
        replan(made.run, ["cluster.gpus_per_node=4"])
    assert caught.value.exit_code == 3
    shown = [str(problem) for problem in caught.value.problems]
    assert any("run.json layout.data_parallel = 2: is pinned" in one for one in shown), shown
    assert any("Add --set layout.data_parallel=auto." in one for one in shown)
    assert not any("layout.tensor_parallel = 1: is pinned" in one for one in shown), "which alone would not help"


def test_a_batch_that_cannot_be_divided_is_infeasible() -> None:
    made = ended_run("layout.tensor_parallel=1", "layout.pipeline_parallel=1")
    with pytest.raises(InfeasibleError, match=r"no layout of .* divides") as caught:
        replan(made.run, ["cluster.gpus_per_node=3"])
    (problem, *_) = caught.value.problems
    assert problem.reason.code == "launch.resume-fixed-batch"
    assert "must be a multiple of 3 data-parallel ranks; a resumed run keeps" in problem.message
    assert problem.hint == "Use a number of nodes that divides it.", "and not another batch, which a resume refuses"


def test_a_rejected_resize_leaves_the_run_unchanged() -> None:
    made, cluster = ended_run(), Refusing()
    with pytest.raises(SchedulerError):
        resume(made.run, resize=replan(made.run, ["cluster.gpus_per_node=1"]), scheduler=cluster)
    assert cluster.seen.revision == 1, "a job that starts at once reads the new layout"
    assert (read_record(made.run).spec, revisions(made.run)) == (made.record.spec, [])
    assert made.run.stop_file.exists()
    assert made.run.manual_stop_file.read_text() == "the disk is to be changed"
    assert len(made.events("submitted")) == 1


@pytest.mark.parametrize("at_fault", ["resolve_commits", "add_revision"])
def test_a_failed_resize_leaves_no_snapshot(tree: WorkingTree, monkeypatch: pytest.MonkeyPatch, at_fault: str) -> None:
    made = ended_run(f"code={{path: {json.dumps(str(tree.folder))}, engine: train}}")
    before = sorted(made.run.path.rglob("*"))
    tree.write("train.py", "print('two')\n")
    resize = replan(made.run, ["cluster.gpus_per_node=1"], new_code=True)

    def fail(*arguments: object, **options: object) -> NoReturn:
        raise UsageError("the hub has no such commit.")

    monkeypatch.setattr(resumption, at_fault, fail)
    with pytest.raises(UsageError, match="no such commit"):
        resume(made.run, resize=resize, scheduler=Cluster())
    assert sorted(made.run.path.rglob("*")) == before


def test_without_an_answer_of_the_scheduler_the_revision_is_kept() -> None:
    made = ended_run()
    with pytest.raises(SchedulerSilentError):
        resume(made.run, resize=replan(made.run, ["cluster.gpus_per_node=1"]), scheduler=Refusing(SchedulerSilentError))
    assert read_record(made.run).spec.world_size == 1
    resume(made.run, scheduler=Cluster())
    assert (read_record(made.run).revision, read_record(made.run).spec.world_size) == (1, 1)
    resume(made.run, resize=replan(made.run, ["cluster.gpus_per_node=4"]), scheduler=Cluster())
    assert (read_record(made.run).revision, read_record(made.run).spec.world_size) == (2, 4)


def test_only_one_of_two_concurrent_resizes_succeeds() -> None:
    made, cluster, gate = ended_run(), Cluster(), threading.Barrier(2)
    resizes = [replan(made.run, [f"cluster.gpus_per_node={size}"]) for size in (1, 4)]

    def try_to(number: int) -> bool:
        gate.wait()
        with contextlib.suppress(UsageError):
            resume(made.run, resize=resizes[number], scheduler=cluster)
            return True
        return False

    with ThreadPoolExecutor(2) as pool:
        won = list(pool.map(try_to, range(2)))
    assert sorted(won) == [False, True]
    assert (revisions(made.run), cluster.submitted) == ([1], 1)
    assert read_record(made.run).spec.world_size == (1, 4)[won.index(True)]


def test_quantized_optimizer_states_are_not_resharded() -> None:
    made, cluster = ended_run("training.optimizer.name=adamw_8bit"), Cluster()
    with pytest.raises(UsageError, match="quantized in blocks") as caught:
        resume(made.run, resize=replan(made.run, ["cluster.gpus_per_node=1"]), scheduler=cluster)
    assert caught.value.exit_code == 2
    assert (revisions(made.run), cluster.submitted) == ([], 0)
    resume(made.run, resize=replan(made.run, ["checkpoint.every=3"]), scheduler=cluster)
    assert cluster.submitted == 1


def test_a_resize_to_another_scheduler_checks_the_old_job_on_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ended_run()
    clusters = {"local": Cluster(), "slurm": Cluster()}
    monkeypatch.setattr(resumption, "backend_for", lambda name: clusters[name])
    clusters["local"].state = "running"
    to_slurm = replan(made.run, ["cluster.scheduler=slurm"])
    with pytest.raises(UsageError, match="still active"):
        resume(made.run, resize=to_slurm)
    clusters["local"].state = "ended"
    resume(made.run, resize=to_slurm)
    assert (clusters["local"].submitted, clusters["slurm"].submitted) == (0, 1)


WEB, CODE, BOOKS = (
    "{name: web, path: /d/web, weight: 1}",
    "{name: code, path: /d/code, weight: 1}",
    "{name: books, path: /d/books, weight: 2}",
)
MIXED = ("data.source=null", f"data.sources=[{WEB}, {CODE}]")


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.sources.0.weight=3",),
        ("data.sources.1.weight=0",),
        ("data.stages=[{start: 0.9, weights: {code: 1}}]",),
        ("data.sources.0.weight=3", "data.stages=[]"),
    ],
)
def test_the_shares_of_sources_may_change(overrides: tuple[str, ...]) -> None:
    made = ended_run(*MIXED, "data.stages=[{start: 0.5, weights: {web: 1}}]")
    assert replan(made.run, overrides).after.revision == 1


def test_changes_of_a_mixture_name_the_items_that_changed() -> None:
    steps = "data.prepare=[{step: normalization}, {step: language, keep: [en]}]"
    before = make_spec(*MIXED, steps)
    assert changed_keys(before, make_spec(*MIXED, steps, "data.sources.0.weight=3")) == {
        "data.sources.0.weight": ("1.0", "3.0")
    }
    more = changed_keys(before, make_spec(MIXED[0], f"data.sources=[{WEB}, {CODE}, {BOOKS}]", steps))
    assert {key: (was, json.loads(now)["name"]) for key, (was, now) in more.items()} == {
        "data.sources.2": ("null", "books")
    }
    assert [*changed_keys(make_spec(MIXED[0], f"data.sources=[{WEB}]", steps), before)] == ["data.sources.1"]
    other = "data.prepare=[{step: language, keep: [en]}, {step: language, keep: [en, de]}]"
    assert {key: was for key, (was, _) in changed_keys(before, make_spec(*MIXED, other)).items()} == {
        "data.prepare.0": json.dumps(before.data.prepare[0].model_dump(mode="json")),
        "data.prepare.1.keep": '["en"]',
    }


@pytest.mark.parametrize(
    ("override", "key", "why"),
    [
        ("data.prepare=[{step: normalization}]", "data.prepare.0", "what is trained cannot change"),
        ("data.sources.0.path=/other", "data.sources.0.path", "what is trained cannot change"),
        ("data.sources.1.field=body", "data.sources.1.field", "what is trained cannot change"),
        (f"data.sources=[{WEB}]", "data.sources", "code is missing"),
        (f"data.sources=[{CODE}, {WEB}]", "data.sources.0.name", "what is trained cannot change"),
        (f"data.sources=[{WEB}, {CODE}, {BOOKS}]", "data.sources.2", "the tokenizer of the run was trained"),
        ("data.validation_split=0.2", "data.validation_split", "what is trained cannot change"),
    ],
)
def test_a_change_of_what_sources_contain_is_another_run(override: str, key: str, why: str) -> None:
    made = ended_run(*MIXED)
    with pytest.raises(UsageError) as refused:
        replan(made.run, [override])
    assert (key, True) in [(problem.key, why in problem.message) for problem in refused.value.problems]


def test_a_source_of_pairs_cannot_be_added_after_the_first_step() -> None:
    given = ("data.tokenizer.kind=file", "data.tokenizer.path=/d/tokenizer.json", "training.objective=dpo")
    made = ended_run(*MIXED, *given)
    assert replan(made.run, ["data.sources.0.weight=0.5"]).changes
    with pytest.raises(UsageError) as refused:
        replan(made.run, [f"data.sources=[{WEB}, {CODE}, {BOOKS}]"])
    assert "no longer those of the reference" in " ".join(problem.message for problem in refused.value.problems)


def test_all_keys_of_data_may_change_until_the_first_step() -> None:
    spec = make_spec(*MIXED)
    created = create_run(spec, make_plan(spec), "mine")
    made = MadeRun(created.run, created.record)
    submit_run(made.run, made.record, Cluster())
    attempt(made, 2, "usage")
    changes = ["data.on_bad=skip", "data.prepare=[]", f"data.sources=[{BOOKS}]", "data.tokenizer.vocab_size=50"]
    after = resume(made.run, resize=replan(made.run, changes), scheduler=Cluster())
    assert after.submission.revision == 1
    data = read_record(made.run).spec.data
    assert (data.on_bad, data.prepare, [source.name for source in data.all_sources]) == ("skip", (), ["books"])
    with pytest.raises(UsageError, match="would no longer be the same run"):
        replan(made.run, ["data.on_bad=stop", "training.seed=7"])
    log_steps(made, 1)
    with pytest.raises(UsageError) as refused:
        replan(made.run, ["data.on_bad=stop"])
    assert "submit a new run for anything else" in str(refused.value)


def test_a_source_may_be_removed_that_has_given_no_sample() -> None:
    given = ("data.tokenizer.kind=file", "data.tokenizer.path=/d/tokenizer.json")
    made = ended_run(*MIXED, *given)
    stages = [{"first_sample": 0, "shares": {"web": 1.0}}]
    record_event(made.run, "mixture", batch=1, first_sample=0, revision=0, stages=stages)
    step = made.record.spec.training.global_batch_size
    stages = [{"first_sample": 0, "shares": {"web": 0.5, "code": 0.5}}]
    record_event(made.run, "mixture", batch=11, first_sample=10 * step, revision=1, stages=stages)
    assert replan(made.run, [f"data.sources=[{WEB}]"]).after.revision == 1
    commit(made, 11)
    with pytest.raises(UsageError) as refused:
        replan(made.run, [f"data.sources=[{WEB}]"])
    assert "code is missing" in refused.value.problems[0].message


def test_batches_after_the_checkpoint_may_be_skipped_and_those_before_it_stay() -> None:
    made = ended_run("data.skip=[[2, 3]]")
    commit(made, 11)  # its last batch is 13
    assert replan(made.run, ["data.skip=[[2, 3], [14, 20]]"]).after.revision == 1
    for skip in ("[[13, 13]]", "[]", "[[2, 3], [13, 14]]", "[[2, 4]]"):
        with pytest.raises(UsageError) as refused:
            replan(made.run, [f"data.skip={skip}"])
        assert "up to batch 13 of its checkpoint" in refused.value.problems[0].message


def test_a_source_of_images_may_be_added_without_a_tokenizer_and_keeps_its_fields() -> None:
    web = "{name: web, path: /data/web, weight: 1, fields: {label: kind}}"
    images = ("model={family: resnet, hidden_sizes: [64], depths: [1]}", "data.source=null")
    made = ended_run(*images, f"data.sources=[{web}]")
    assert replan(made.run, [f"data.sources=[{web}, {BOOKS}]"]).after.revision == 1
    for change in ("data.sources.0.fields.label=other", "data.sources.0.fields=null"):
        with pytest.raises(UsageError) as refused:
            replan(made.run, [change])
        assert refused.value.problems[0].key == "data.sources.0.fields"


def test_a_source_may_be_added_where_the_data_of_the_others_stay_the_same(tmp_path: Path) -> None:
    given = ("data.tokenizer.kind=file", "data.tokenizer.path=/d/tokenizer.json")
    more = f"data.sources=[{WEB}, {CODE}, {BOOKS}]"
    assert replan(ended_run(*MIXED, *given).run, [more]).after.revision == 1
    duplicates = "data.prepare=[{step: duplicates}]"
    with pytest.raises(UsageError) as refused:
        replan(ended_run(*MIXED, *given, duplicates, name="other").run, [more])
    assert "would remove other documents" in refused.value.problems[0].message
    (tmp_path / "dataset.json").write_text("{}")
    prepared = f"data.sources=[{WEB}, {CODE}, {{name: books, path: {tmp_path}, weight: 2}}]"
    assert replan(ended_run(*MIXED, duplicates, name="third").run, [prepared]).after.revision == 1
