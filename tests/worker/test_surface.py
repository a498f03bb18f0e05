import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import scaletrain_cli.worker as worker
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.attempts import begin_attempt
from scaletrain_cli.launch.submit import create_run
from scaletrain_cli.rundir.checkpoints import list_checkpoints
from scaletrain_cli.rundir.mirror_state import MirrorState, write_mirror_state
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import add_revision, checkpoint_folder, read_record
from scaletrain_cli.worker.hugging_face import ScaletrainCallback
from scaletrain_cli.worker.lightning import ScaletrainLightning
from scaletrain_cli.worker.run_environment import read_resolved_run
from tests.launch.conftest import MadeRun, make_plan, make_spec

# A change here is a change of WORKER_API_VERSION: major for one that breaks a program, minor for an addition.
SURFACE = """
Checkpoint(path, step, world_size, clean, attempt, files)
Checkpoint.size_bytes
Checkpoints(folder, attempt, world_size, *, keep, keep_every)
Checkpoints.adopt(step, folder)
Checkpoints.commit(step, files, *, clean)
Checkpoints.folder_of(step)
Checkpoints.latest()
Checkpoints.open()
Checkpoints.scratch()
Checkpoints.stage(step)
Checkpoints.staged(step)
ExitCode(*values)
FileDigest(size, sha256)
HashingWriter(path)
HashingWriter.close()
HashingWriter.flush()
HashingWriter.write(data)
Heartbeat(descriptor, *, several_nodes, clock)
Heartbeat.allow(*, hang_seconds, step_seconds, bytes_per_node, compiled)
Heartbeat.beat(step, phase, allowed_seconds)
Heartbeat.from_environment(environment)
Heartbeat.has_batch()
Heartbeat.longest_seconds
Heartbeat.wait_for_ranks()
PreemptionFlag()
PreemptionFlag.call_after(seconds, function)
PreemptionFlag.install()
PreemptionFlag.raised
PreemptionFlag.seconds_left(grace_seconds)
PreemptionFlag.set_handlers()
Rank(environment, resolved)
Rank.add_telemetry(**values)
Rank.exit(code)
Rank.log_metrics(step, **values)
Rank.record_event(event, **details)
Rank.run(train)
Rank.start(run_dir)
ResolvedRun(spec, plan, checkpoint_folder)
ResolvedRun.checkpoint_interval_steps
ResolvedRun.total_steps
RunEnvironment(run, attempt, rank, world_size, local_rank, local_world_size, node_rank)
RunEnvironment.read(run_dir, environment)
ScaletrainCallback(rank)
ScaletrainCallback.rank
ScaletrainCallback.resume_folder()
ScaletrainCallback.run(trainer, *, after, **arguments)
ScaletrainCallback.start(run_dir)
ScaletrainCallback.train(trainer, **arguments)
ScaletrainLightning(rank)
ScaletrainLightning.callback()
ScaletrainLightning.fit(trainer, arguments, **named)
ScaletrainLightning.run(trainer, arguments, *, after, **named)
ScaletrainLightning.start(run_dir)
ScaletrainLightning.trainer_arguments()
StagedCheckpoint(folder)
StagedCheckpoint.add(name)
StagedCheckpoint.file(name)
StagedCheckpoint.names()
SupersededAttemptError
WORKER_API_VERSION
"""
VERSION = "1.3"


def made_run(*overrides: str) -> MadeRun:
    spec = make_spec(*overrides)
    made = create_run(spec, make_plan(spec), None)
    return MadeRun(made.run, made.record)


def test_the_surface_is_that_of_the_stated_version() -> None:
    assert worker.WORKER_API_VERSION == VERSION
    assert surface() == SURFACE.split("\n")[1:-1]


def surface() -> list[str]:
    lines = []
    adapters = {cls.__name__: cls for cls in (ScaletrainCallback, ScaletrainLightning)}
    for name, thing in ({name: getattr(worker, name) for name in worker.__all__} | adapters).items():
        if not inspect.isclass(thing) or issubclass(thing, Exception):
            lines.append(name)
            continue
        lines.append(f"{name}(*values)" if name == "ExitCode" else signature(name, thing))
        members = {} if name == "ExitCode" else vars(thing)
        for member, value in members.items():
            if not member.startswith(("_", "on_")):  # Trainer calls the events
                full = f"{name}.{member}"
                if isinstance(value, property):
                    lines.append(full)
                elif callable(value) or isinstance(value, classmethod):
                    lines.append(signature(full, getattr(thing, member)))
    return sorted(lines)


def signature(name: str, function: object) -> str:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    words, keywords_only = [], False
    for parameter in parameters:
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords_only:
            keywords_only = True
            words.append("*")
        words.append(f"**{parameter.name}" if parameter.kind is parameter.VAR_KEYWORD else parameter.name)
    return f"{name}({', '.join(words)})"


def test_the_package_needs_the_standard_library_alone() -> None:
    program = (
        "import sys, scaletrain_cli.worker\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(names - set(sys.stdlib_module_names) - {'scaletrain_cli', '__main__', 'sitecustomize'}))\n"
    )
    # -S: no site-packages at all, so that a library that is imported on the way would be missed.
    environment = {"PYTHONPATH": str(Path(worker.__file__).parents[2]), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-S", "-c", program], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_resolved_run_is_what_the_launcher_decided_last(tmp_path: Path) -> None:
    made = made_run("training.steps=40", "checkpoint.every=10")
    record = read_record(made.run)
    found = read_resolved_run(made.run)
    assert (found.total_steps, found.checkpoint_interval_steps) == (40, 10)
    assert found.spec == record.spec.model_dump(mode="json", by_alias=True)
    assert found.checkpoint_folder == checkpoint_folder(made.run, record.spec)
    elsewhere = record.spec.checkpoint.model_copy(update={"dir": str(tmp_path / "disk")})
    add_revision(made.run, record, record.spec.model_copy(update={"checkpoint": elsewhere}), record.plan, [])
    assert read_resolved_run(made.run).checkpoint_folder == tmp_path / "disk" / made.run.run_id
    for named, folder in ((0, found.checkpoint_folder), (1, tmp_path / "disk" / made.run.run_id)):
        attempt = begin_attempt(made.run, record.spec, scheduler="slurm", job_id="1", nodes=("n1",), revision=named)
        assert read_resolved_run(made.run, attempt).checkpoint_folder == folder


def test_training_tokens_give_the_same_number_of_steps_as_in_the_spec() -> None:
    made = made_run("training.steps=null", "training.tokens=100001")
    assert read_resolved_run(made.run).total_steps == read_record(made.run).spec.total_steps


def test_a_program_that_no_agent_started_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="RANK, WORLD_SIZE"):
        worker.RunEnvironment.read("/runs/a", {"SCALETRAIN_ATTEMPT": "1"})


def test_a_checkpoint_is_committed_whole_pruned_and_found_again(tmp_path: Path) -> None:
    checkpoints = worker.Checkpoints(tmp_path, 1, 2, keep=2)
    checkpoints.open()
    assert checkpoints.latest() is None
    for step in (5, 10, 15):
        staged = checkpoints.stage(step)
        with staged.file("state.bin") as file:
            file.write(f"step {step}".encode())
        checkpoints.commit(step, staged.digests)
    latest = checkpoints.latest()
    assert (latest.step, (latest.path / "state.bin").read_bytes()) == (15, b"step 15")
    assert not (tmp_path / "step-00000005").exists()


def test_retention_of_a_program_keeps_its_best_checkpoint_and_that_which_the_mirror_copies(tmp_path: Path) -> None:
    keys = ("checkpoint.keep=1", "checkpoint.keep_best=validation_loss", f"checkpoint.mirror.to={tmp_path}")
    run = made_run(*keys).run
    rank = worker.Rank(worker.RunEnvironment(run, 1, 0, 1, 0, 1, 0), read_resolved_run(run))
    rank.checkpoints.open()
    write_mirror_state(run, MirrorState(str(tmp_path), 1, 0.0, uploading_step=10))
    for step, loss in ((5, 0.1), (10, 0.3), (15, 0.2), (20, 0.2)):
        rank.log_metrics(step, validation_loss=loss)
        rank.checkpoints.commit(step, rank.checkpoints.stage(step).digests)
    assert [found.step for found in list_checkpoints(rank.checkpoints.folder)] == [5, 10, 20]


def test_an_attempt_that_a_later_one_has_superseded_commits_nothing(tmp_path: Path) -> None:
    first, second = worker.Checkpoints(tmp_path, 1, 1), worker.Checkpoints(tmp_path, 2, 1)
    first.open()
    staged = first.stage(5)
    second.open()
    with pytest.raises(worker.SupersededAttemptError):
        first.commit(5, staged.digests)
    assert second.latest() is None


PROGRAM = """
import sys
from scaletrain_cli.worker import Rank
rank = Rank.start(sys.argv[1])

def train():
    rank.heartbeat.beat(1, "step")
    rank.log_metrics(1, loss=0.5)
    rank.log_metrics(2, loss=float("nan"), lr=0.1)
    rank.record_event("started", step=0)
    {end}

rank.run(train)
"""


@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [("return 75", 75, None), ("raise OSError(28, 'No space left on device')", 93, "disk-full")],
    ids=["preempted", "full disk"],
)
def test_a_rank_ends_with_its_exit_code_and_leaves_its_records(end: str, code: int, reason: str | None) -> None:
    from scaletrain_cli.rundir.journal import read_events, read_metrics
    from scaletrain_cli.worker.failures import read_failures

    made = made_run()
    place = {"SCALETRAIN_ATTEMPT": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment = {**os.environ, **place, "NODE_RANK": "0"}
    environment.pop("SCALETRAIN_AGENT_PID", None)
    command = [sys.executable, "-c", PROGRAM.format(end=end), str(made.run.path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert [failure.reason for failure in read_failures(made.run, 1)] == ([reason] if reason else [])
    first, second = read_metrics(RunDir(made.run.path))
    assert (first["loss"], second["loss"], second["lr"]) == (0.5, None, 0.1)
    assert read_events(made.run)[-1]["event"] == "started"
