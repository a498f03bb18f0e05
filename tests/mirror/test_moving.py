import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.cli import resume as resume_command
from scaletrain_cli.errors import InfeasibleError, UsageError
from scaletrain_cli.launch.attempts import begin_attempt, read_attempts
from scaletrain_cli.launch.replan import replan
from scaletrain_cli.launch.resume import inspect_resume, refuse
from scaletrain_cli.launch.resume_elsewhere import (
    cluster_overrides,
    complete_from_mirror,
    find_to_move,
    move_here,
    set_older_aside,
)
from scaletrain_cli.launch.submit import PlannedRun, create_run, plan_run
from scaletrain_cli.mirror import restore
from scaletrain_cli.mirror.claims import make_claim, new_claim, own_claim, read_claims
from scaletrain_cli.mirror.restore import draft_folder
from scaletrain_cli.mirror.stores import MirrorError
from scaletrain_cli.plan.reliability.node_sizes import NodeSize
from scaletrain_cli.rundir.journal import read_events, record_event
from scaletrain_cli.rundir.mirror_state import read_superseded
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import add_revision, documents_of, place_documents, read_record, read_size_plans
from scaletrain_cli.safe_files import make_folder
from scaletrain_cli.spec import RunSpec
from tests.cli.command_line import scaletrain
from tests.data.remote.faults import FaultyProxy
from tests.launch.conftest import make_spec
from tests.mirror.conftest import MakeMirrored, MirroredRun, at_both_places, claimed, newest_valid, owned


@pytest.fixture
def mirrored(make_mirrored: MakeMirrored, place: str) -> MirroredRun:
    """A run with two mirrored checkpoints."""
    made = make_mirrored(place)
    mirror = made.mirror_of(10, 20)
    mirror.look(is_last=True)
    return made


def move(mirrored: MirroredRun, root: Path, *, take_over: bool = False) -> RunDir:
    return move_here(find_to_move(mirrored.to, "moving", take_over=take_over, root=root), root=root).run


@at_both_places
def test_a_run_moves_with_its_newest_checkpoint_its_id_and_its_history(mirrored: MirroredRun, tmp_path: Path) -> None:
    mirrored.mirror().release()
    events, metrics = mirrored.run.events.read_bytes(), mirrored.run.metrics.read_bytes()
    shards = {path.name: path.read_bytes() for path in (mirrored.run.checkpoints / "step-00000020").iterdir()}
    shutil.rmtree(mirrored.run.path.parent)
    run = move(mirrored, tmp_path / "second")
    assert run.path == tmp_path / "second" / "moving"
    assert {path.name: path.read_bytes() for path in (run.checkpoints / "step-00000020").iterdir()} == shards
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000020"]
    assert events.startswith(run.events.read_bytes()[: len(events) - 300])
    assert run.metrics.read_bytes() == metrics
    record = read_record(run)
    assert (record.run_id, record.wandb_run_id) == ("moving", mirrored.record.wandb_run_id)
    (moved,) = [event for event in read_events(run) if event["event"] == "moved"]
    assert (moved["step"], moved["generation"], moved["from_run_dir"]) == (20, 2, str(mirrored.run.path))
    assert not draft_folder(tmp_path / "second", "moving").exists()
    assert newest_valid(run) == (20, [])


def test_a_run_that_may_be_active_is_moved_only_with_take_over(mirrored: MirroredRun, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"may still train in .*/first/moving") as raised:
        move(mirrored, tmp_path / "second")
    assert "--take-over" in str(raised.value)
    assert not (tmp_path / "second").exists()
    run = move(mirrored, tmp_path / "second", take_over=True)
    assert owned(run) == (2, 20)


def test_the_place_before_stops_and_late_checkpoints_are_never_restored(mirrored: MirroredRun, tmp_path: Path) -> None:
    old = mirrored.mirror()
    old.look()
    second = move(mirrored, tmp_path / "second", take_over=True)
    mirrored.commit(30)
    assert not mirrored.run.is_cancelled
    old.look()  # it finds the claim before it commits
    assert old.is_superseded
    assert mirrored.run.is_cancelled
    assert (read_superseded(mirrored.run) or {})["run_dir"] == str(second.path)
    assert len(mirrored.events("mirror-superseded")) == 1
    assert mirrored.steps() == [10, 20]
    with pytest.raises(UsageError, match=r"continues in .*/second/moving"):
        refuse(mirrored.run, inspect_resume(mirrored.run))


@at_both_places
def test_what_a_place_commits_after_it_was_superseded_is_outside_the_line(
    mirrored: MirroredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = mirrored.mirror()
    old.look()
    move(mirrored, tmp_path / "second", take_over=True)
    mirrored.commit(30)
    monkeypatch.setattr(old, "_before_commit", old._write_history)  # as if it had looked just before the new claim
    old.look(is_last=True)
    assert any("step-00000030" in name for name in mirrored.store.list("checkpoints/0001"))
    assert mirrored.steps() == [10, 20]
    third = move(mirrored, tmp_path / "third", take_over=True)
    assert [path.name for path in third.checkpoints.iterdir()] == ["step-00000020"]
    assert [event["step"] for event in read_events(third) if event["event"] == "checkpoint"] == [10, 20]


def test_the_second_place_mirrors_on_and_the_run_can_return(mirrored: MirroredRun, tmp_path: Path) -> None:
    run = move(mirrored, tmp_path / "second", take_over=True)
    second = MirroredRun(run, read_record(run))
    mirror = second.mirror()
    mirror.look()
    second.commit(30)
    assert mirror.look(is_last=True)
    assert second.steps() == [20, 30]
    mirror.release()
    mirrored.mirror().look()
    back = move(mirrored, mirrored.run.path.parent)
    assert back.path == mirrored.run.path
    assert not back.is_cancelled
    assert [path.name for path in back.checkpoints.iterdir()] == ["step-00000030"]
    assert len([event for event in read_events(back) if event["event"] == "moved"]) == 2
    assert (back.path.parent / ".moving.generation-1" / "checkpoints").is_dir()


@at_both_places
def test_only_one_of_two_places_gets_the_next_claim(mirrored: MirroredRun, tmp_path: Path) -> None:
    found = [find_to_move(mirrored.to, "moving", take_over=True, root=tmp_path / name) for name in ("second", "third")]
    first = move_here(found[0], root=tmp_path / "second").run
    with pytest.raises(MirrorError, match="another place has just continued"):
        move_here(found[1], root=tmp_path / "third")
    assert not (tmp_path / "third" / "moving").exists()
    claim = read_claims(mirrored.store)[-1]
    assert claim == own_claim(first)
    make_folder(tmp_path / "fourth")
    assert not make_claim(mirrored.store, RunDir(tmp_path / "fourth"), new_claim(first, 2))


def test_a_damaged_file_in_the_mirror_is_passed_over(mirrored: MirroredRun, tmp_path: Path) -> None:
    newest = mirrored.mirrored()[-1]
    name = f"{newest.name}/rank-00001.safetensors"
    content = bytearray(mirrored.store.read(name) or b"")
    content[7] ^= 1
    mirrored.store.write(name, bytes(content))
    root = tmp_path / "second"
    restored = move_here(find_to_move(mirrored.to, "moving", take_over=True, root=root), root=root)
    assert restored.checkpoint.step == 10
    assert len(restored.passed_over) == 1
    assert name in restored.passed_over[0]
    assert owned(restored.run)[1] == 10


@pytest.fixture
def live(make_mirrored: MakeMirrored, tmp_path: Path) -> MirroredRun:
    """A run whose mirror keeps one recent checkpoint and multiples of 10."""
    return make_mirrored(str(tmp_path / "other-disk"), "checkpoint.mirror.keep=1", "checkpoint.mirror.keep_every=10")


def test_a_checkpoint_that_a_live_owner_deletes_meanwhile_gives_way_to_its_newer_one(
    live: MirroredRun, tmp_path: Path
) -> None:
    mirror = live.mirror_of(10, 15)
    found = find_to_move(live.to, "moving", take_over=True, root=tmp_path / "second")
    assert found.folders[0].step == 15
    live.commit(16)
    mirror.look()
    assert live.steps() == [10, 16]
    restored = move_here(found, root=tmp_path / "second")
    assert (restored.checkpoint.step, restored.passed_over) == (16, [])
    assert claimed(live.store).from_step == 16
    assert [event["step"] for event in read_events(restored.run) if event["event"] == "checkpoint"] == [10, 15, 16]


def test_a_checkpoint_that_is_committed_before_the_claim_is_not_lost(live: MirroredRun, tmp_path: Path) -> None:
    mirror = live.mirror_of(15)
    checks: list[int] = []

    def check(draft: RunDir) -> None:
        checks.append(len(checks))
        if len(checks) == 1:
            live.commit(16)
            mirror.look()

    found = find_to_move(live.to, "moving", take_over=True, root=tmp_path / "second")
    assert move_here(found, root=tmp_path / "second", check=check).checkpoint.step == 16
    assert len(checks) == 2


def test_a_mirror_that_always_changes_is_not_taken_over(live: MirroredRun, tmp_path: Path) -> None:
    mirror = live.mirror_of(11)

    def check(draft: RunDir) -> None:
        live.commit(live.here()[-1] + 1)
        mirror.look()

    found = find_to_move(live.to, "moving", take_over=True, root=tmp_path / "second")
    with pytest.raises(MirrorError, match="faster than they are received"):
        move_here(found, root=tmp_path / "second", check=check)
    assert claimed(live.store).generation == 1


def test_the_command_shows_the_step_that_was_restored_and_what_was_passed_over(
    mirrored: MirroredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path / "second"))
    mirrored.store.delete(f"{mirrored.mirrored()[-1].name}/rank-00001.safetensors")
    shown: list[str] = []
    monkeypatch.setattr("scaletrain_cli.cli.resume.say", shown.append)
    monkeypatch.setattr("scaletrain_cli.cli.resume.warn", shown.append)
    moved = resume_command._move("moving", mirrored.to, None, [], True, dry_run=False, yes=True, as_json=False)
    assert moved is not None
    found, passed_over, received = shown
    assert "up to step 20" in found
    assert "rank-00001.safetensors" in passed_over
    assert received.startswith("received step 10, ")


def test_without_a_valid_checkpoint_nothing_is_claimed(mirrored: MirroredRun, tmp_path: Path) -> None:
    for folder in mirrored.mirrored():
        mirrored.store.delete(f"{folder.name}/rank-00000.safetensors")
    with pytest.raises((MirrorError, UsageError)):
        move(mirrored, tmp_path / "second", take_over=True)
    assert claimed(mirrored.store).generation == 1


def test_a_download_that_was_cut_continues(s3: FaultyProxy, make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made = make_mirrored()
    made.commit(10, (9 << 20, 50_000))
    made.mirror().look()
    root = tmp_path / "second"
    s3.fault = lambda request: "denied" if "bytes=8388608-" in request.range else None
    with pytest.raises(UsageError):
        move(made, root, take_over=True)
    draft = draft_folder(root, "moving") / "checkpoints" / "step-00000010"
    assert (draft / "rank-00000.safetensors.part").stat().st_size == 8 << 20
    s3.fault, before = (lambda request: None), len(s3.seen)
    run = move(made, root, take_over=True)
    ranges = [request.range for request in s3.seen[before:] if "rank-" in request.path and request.method == "GET"]
    assert ranges == ["bytes=8388608-9437183"]
    assert newest_valid(run)[0] == 10


@pytest.mark.parametrize(
    "fault", ["changed", *(pytest.param(each, marks=pytest.mark.long) for each in ("short", "reset"))]
)
def test_faults_of_a_download_never_give_other_bytes(
    s3: FaultyProxy, make_mirrored: MakeMirrored, tmp_path: Path, fault: str
) -> None:
    made = make_mirrored()
    made.commit(10, (90_000, 50_000))
    made.mirror().look()
    numbers = iter(range(1000))
    s3.fault = lambda request: fault if "rank-" in request.path and request.range and next(numbers) % 2 == 0 else None
    run = move(made, tmp_path / "second", take_over=True)
    assert fault in s3.broken
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        here, there = (each.checkpoints / "step-00000010" / name for each in (run, made.run))
        assert here.read_bytes() == there.read_bytes()


def test_an_attempt_without_an_end_gets_one(mirrored: MirroredRun, tmp_path: Path) -> None:
    begin_attempt(mirrored.run, mirrored.record.spec, scheduler="slurm", job_id="7", nodes=("gone",))
    record_event(mirrored.run, "resumed", step=20)
    mirrored.mirror().look(is_last=True)
    run = move(mirrored, tmp_path / "second", take_over=True)
    (attempt,) = read_attempts(run)
    assert attempt.ended is not None
    report = inspect_resume(run)
    assert not report.active
    refuse(run, report)


def test_a_run_that_is_not_there_is_named(mirrored: MirroredRun, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no run another"):
        find_to_move(mirrored.to, "another", root=tmp_path / "second")
    with pytest.raises(UsageError, match="is a directory of this run"):
        find_to_move(mirrored.to, "moving", root=mirrored.run.path.parent)
    found = find_to_move(f"{mirrored.to}/moving/", "moving", take_over=True, root=tmp_path / "second")
    assert found.place == mirrored.to, "with the run id, too"


@pytest.fixture
def ranged(tmp_path: Path) -> MirroredRun:
    spec = make_spec(
        *("cluster.scheduler=slurm", "cluster.slurm.partition=main", "cluster.gpus_per_node=1"),
        *("cluster.nodes={min: 1, max: 4}", f"checkpoint.mirror.to={tmp_path / 'other-disk'}"),
    )
    plan = plan_run(spec, "fake.yaml").plan
    sizes = dict.fromkeys((1, 2, 4), plan)  # so small a model would not be faster on more nodes
    made = create_run(spec, plan, "moving", root=tmp_path / "first", size_plans=sizes)
    run = MirroredRun(made.run, made.record)
    run.commit(10)
    return run


def test_the_plans_of_a_range_of_nodes_move_with_the_run(ranged: MirroredRun, tmp_path: Path) -> None:
    ranged.mirror().look(is_last=True)
    run = move(ranged, tmp_path / "second", take_over=True)
    record = read_record(run)
    assert record.sizes == (1, 2, 4)
    assert read_size_plans(run, record) == read_size_plans(ranged.run, ranged.record)


@pytest.mark.parametrize("plannable", [True, False])
def test_sizes_that_an_older_mirror_lacks_are_planned_again_or_dropped(
    ranged: MirroredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plannable: bool
) -> None:
    plans = read_size_plans(ranged.run, ranged.record)
    (ranged.run.path / "sizes.json").unlink()
    ranged.mirror().look(is_last=True)

    def planned(spec: RunSpec, file: object) -> PlannedRun:
        if not plannable:
            raise InfeasibleError("no layout fits")
        return PlannedRun(spec, plans[4], tuple(NodeSize(nodes, plan) for nodes, plan in plans.items() if nodes > 1))

    monkeypatch.setattr("scaletrain_cli.launch.resume_elsewhere.plan_run", planned)
    found = find_to_move(ranged.to, "moving", take_over=True, root=tmp_path / "second")
    restored = move_here(found, root=tmp_path / "second")
    record, (note,) = read_record(restored.run), restored.notes
    assert list(read_size_plans(restored.run, record)) == ([2, 4] if plannable else [])
    if plannable:
        assert str(note).endswith("planned again, it may start on 2, 4 nodes")
    else:
        assert record.spec.cluster.node_range is None
        assert "cannot be planned here: no layout fits. It continues on 4 nodes only" in str(note)


def test_a_mirror_may_be_given_by_a_relative_path(
    make_mirrored: MakeMirrored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_mirrored(str(tmp_path / "other-disk"))
    made.mirror_of(10)
    (tmp_path / "other-disk").rename(tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    found = find_to_move("./copy", "moving", take_over=True, root=tmp_path / "second")
    run = move_here(found, root=tmp_path / "second").run
    assert read_record(run).spec.checkpoint.mirror.to == str(tmp_path / "copy")


def test_an_address_that_cannot_be_a_mirror_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be in a store that can be written to"):
        find_to_move("https://host/bucket", "moving", root=tmp_path / "second")


def test_the_settings_of_the_new_place_are_written_before_a_claim(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made = make_mirrored(str(tmp_path / "other-disk"))
    made.mirror_of(10)
    shutil.copytree(tmp_path / "other-disk", tmp_path / "copy")

    def check(draft: RunDir) -> None:
        assert read_record(draft).spec.checkpoint.mirror.to == str(tmp_path / "copy")
        raise UsageError("refused")

    for _ in range(2):
        found = find_to_move(str(tmp_path / "copy"), "moving", take_over=True, root=tmp_path / "second")
        with pytest.raises(UsageError, match="refused"):
            move_here(found, root=tmp_path / "second", check=check)
    assert claimed(found.store).generation == 1


def test_a_blob_that_differs_is_found(mirrored: MirroredRun, tmp_path: Path) -> None:
    for name in mirrored.store.list("blobs"):
        mirrored.store.write(name, json.dumps({"other": 1}).encode())
    with pytest.raises(MirrorError, match="is not what was written there"):
        move(mirrored, tmp_path / "second", take_over=True)
    assert claimed(mirrored.store).generation == 1


CLUSTERS = """
clusters:
  slurm-site: {scheduler: slurm, gpus_per_node: 4, nodes: 1, slurm: {partition: gpu, account: lab}}
  laptop: {scheduler: local, gpus_per_node: 1, gpu: cpu}
"""


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clusters.yaml").write_text(CLUSTERS)
    monkeypatch.setenv("SCALETRAIN_CLUSTERS", str(tmp_path / "clusters.yaml"))


def test_a_run_is_planned_for_a_cluster_and_back(clusters: None, make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made = make_mirrored(str(tmp_path / "other-disk"))
    there = replan(made.run, cluster_overrides(made.run, "slurm-site"))
    cluster = there.spec.cluster
    assert (cluster.scheduler, cluster.gpus_per_node, cluster.slurm.partition) == ("slurm", 4, "gpu")
    assert there.plan.layout.world_size == 4
    assert there.spec.training == made.record.spec.training
    add_revision(made.run, there.before, there.spec, there.plan, there.overrides)
    back = replan(made.run, cluster_overrides(made.run, "laptop"))
    assert (back.spec.cluster.scheduler, back.plan.layout.world_size) == ("local", 1)
    assert back.spec.cluster.slurm.partition is None
    with pytest.raises(UsageError, match="no such cluster"):
        cluster_overrides(made.run, "elsewhere")


def test_paths_of_data_may_change_for_a_run_that_moves_only(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    made = make_mirrored(str(tmp_path / "other-disk"))
    made.commit(10)
    with pytest.raises(UsageError, match="would no longer be the same run"):
        replan(made.run, ["data.source=/elsewhere/text.txt"])
    moved = replan(made.run, ["data.source=/elsewhere/text.txt"], moving=True)
    assert moved.spec.data.source == "/elsewhere/text.txt"
    with pytest.raises(UsageError):
        replan(made.run, ["data.source=/elsewhere/text.txt", "training.seed=7"], moving=True)


def test_rows_for_validation_may_have_another_path_if_a_run_moves(make_mirrored: MakeMirrored, tmp_path: Path) -> None:
    tokenizer = "data.tokenizer={kind: file, path: tokenizer.json}"
    sources = "[{name: a, path: a.jsonl, weight: 1, validation_path: v.jsonl}, {name: b, path: b.jsonl, weight: 1}]"
    for run_id, data, key in (
        ("one", ("data.source=a.jsonl", "data.validation_source=v.jsonl"), "data.validation_source"),
        ("several", ("data.source=null", f"data.sources={sources}"), "data.sources.0.validation_path"),
    ):
        made = make_mirrored(str(tmp_path / run_id), "training.objective=sft", tokenizer, *data, run_id=run_id)
        made.commit(10)
        with pytest.raises(UsageError, match="would no longer be the same run"):
            replan(made.run, [f"{key}=/elsewhere/v.jsonl"])
        moved = replan(made.run, [f"{key}=/elsewhere/v.jsonl"], moving=True)
        assert [path for _, path in moved.spec.data.validation_paths()] == ["/elsewhere/v.jsonl"]


def test_a_plan_that_is_impossible_on_the_new_cluster_leaves_the_owner(
    mirrored: MirroredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path / "second"))
    words = ("resume", "moving", "--from-mirror", mirrored.to, "--take-over", "--yes")
    scaletrain(*words, "--set", "training.seed=7", code=2)
    assert claimed(mirrored.store).generation == 1
    assert not (tmp_path / "second" / "moving").exists()
    shown = scaletrain(*words, "--dry-run", "--json").data
    assert (shown["step"], shown["owner"]["generation"], shown["released"]) == (20, 1, False)


def documents_for_pods(run: RunDir, tmp_path: Path) -> Path:
    """Return the folder with the documents that a job of the run carries."""
    folder = tmp_path / "documents"
    folder.mkdir()
    for name, text in documents_of(run, read_record(run)).items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("cut", ["download_checkpoint", "restore_history"])
def test_pods_continue_what_an_interrupted_pod_began(
    mirrored: MirroredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    begin_attempt(mirrored.run, mirrored.record.spec, scheduler="slurm", job_id="7", nodes=("gone",))
    mirrored.mirror().look(is_last=True)
    documents = documents_for_pods(move(mirrored, tmp_path / "second", take_over=True), tmp_path)
    pods, record = place_documents(documents, tmp_path / "volume")
    whole = getattr(restore, cut)

    def interrupted(*given: Any, **options: Any) -> None:
        if cut == "restore_history":
            whole(*given, **options)
        raise OSError("the pod was evicted")

    with monkeypatch.context() as patch:
        patch.setattr(restore, cut, interrupted)
        with pytest.raises(OSError, match="evicted"):
            complete_from_mirror(pods, record)
    assert complete_from_mirror(pods, record)
    assert newest_valid(pods)[0] == 20
    assert len(read_attempts(pods)) == 1
    assert not complete_from_mirror(pods, record)
    assert not complete_from_mirror(RunDir(tmp_path / "second" / "moving"), record), "the submitter brought all of it"


def test_a_directory_of_an_earlier_owner_on_the_volume_is_set_aside(mirrored: MirroredRun, tmp_path: Path) -> None:
    volume = mirrored.run.path.parent
    documents = documents_for_pods(move(mirrored, tmp_path / "second", take_over=True), tmp_path)
    assert set_older_aside(documents, volume) == volume / ".moving.generation-1"
    pods, record = place_documents(documents, volume)
    assert complete_from_mirror(pods, record)
    assert set_older_aside(documents, volume) is None, "it is that of the claim now"
    assert set_older_aside(documents, tmp_path / "elsewhere") is None
    assert [path.name for path in pods.checkpoints.iterdir()] == ["step-00000020"]
    assert owned(pods)[0] == 2
    make_claim(mirrored.store, pods, new_claim(pods, 3, from_step=20))
    with pytest.raises(UsageError, match="belongs to a later owner"):
        set_older_aside(documents, volume)


def test_pods_bring_the_run_to_a_volume_that_the_submitter_cannot_access(mirrored: MirroredRun, tmp_path: Path) -> None:
    documents = documents_for_pods(move(mirrored, tmp_path / "second", take_over=True), tmp_path)
    assert set_older_aside(documents, tmp_path / "volume") is None
    pods, record = place_documents(documents, tmp_path / "volume")
    assert complete_from_mirror(pods, record)
    assert newest_valid(pods) == (20, [])
    assert pods.metrics.read_bytes() == mirrored.run.metrics.read_bytes()
    assert [event["step"] for event in read_events(pods) if event["event"] == "moved"] == [20]
    assert own_claim(pods) == read_claims(mirrored.store)[-1]
    begin_attempt(pods, record.spec, scheduler="kubernetes", job_id="1", nodes=("a",))
    assert not complete_from_mirror(pods, record), "only before the first attempt"
