import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.errors import DoNotRequeueError, Problem, UsageError, WrongNodesError
from scaletrain_cli.full_disk import no_space
from scaletrain_cli.launch.exit_classification import classify_exit
from scaletrain_cli.launch.node.record import RankRecord
from scaletrain_cli.launch.node.watch import ExitDiagnosis, memory_kills
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.worker.failures import (
    Failure,
    exit_code_of,
    failure_of,
    failure_reason_of,
    read_failures,
    reason_in,
    report_exception,
    write_failure,
)
from scaletrain_cli.worker.position import RankView
from tests.launch.test_attempts import judged, node, rank

GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:3211"
NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:1691, remote process exited or there was a network error, NCCL version 2.21.5"
)
ECC = "CUDA error: uncorrectable ECC error encountered"


class DistBackendError(RuntimeError):
    """Has the name of torch's exception."""


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's exception."""


class DivergedError(DoNotRequeueError):
    failure_reason = "nan"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "oom"),
        (MemoryError(), "host-oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"), "host-oom"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk-full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk-full"),
        (FileNotFoundError(errno.ENOENT, "gone"), "crash"),
        (DistBackendError(NCCL), "communication"),
        (DistBackendError(f"{NCCL}; {ECC}"), "hardware"),
        (RuntimeError(GLOO), "communication"),
        (RuntimeError("[gloo/transport/tcp/buffer.cc:81] Timed out waiting 1800000ms for recv"), "communication"),
        (RuntimeError(ECC), "hardware"),
        (RuntimeError("CUDA error: device-side assert triggered"), "crash"),
        (DivergedError("step 3: loss nan"), "nan"),
        (UsageError("no such corpus"), "usage"),
        (ValueError("connection of ideas"), "crash"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_exit_reason_of_an_error(error: BaseException, reason: str) -> None:
    assert failure_reason_of(error) == reason


def test_an_error_of_the_package_keeps_its_code_and_another_error_gets_one_with_its_message() -> None:
    own = Reason("engine.gpu-missing", {"local_rank": 1, "found": 0})
    failure = failure_of(WrongNodesError(own), 3)
    assert (failure.why, failure.reason) == (own, "wrong-nodes")
    full = failure_of(OSError(errno.ENOSPC, "No space left on device"), 3)
    assert (full.code, full.reason) == ("engine.disk-full", "disk-full")
    assert str(failure_of(ValueError("x"), 3).why) == "ValueError: x"


def test_a_failure_has_the_list_of_problems_of_its_error() -> None:
    problems = (Problem("model.safetensors", "wte.weight", "the model has [32, 16]."),)
    missing = Reason("engine.weights-missing", {"key": "model.weights", "folder": "w", "name": "x"})
    failure = failure_of(UsageError(missing, problems), 0)
    assert str(failure.why) == "model.weights: w has no x: model.safetensors wte.weight: the model has [32, 16]."
    assert failure.params["cause"]["code"] == "engine.weights-missing"


def test_the_cause_is_found_anywhere_in_the_chain_of_exceptions() -> None:
    writer = RuntimeError("the writer thread failed")
    writer.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert failure_reason_of(writer) == "disk-full"
    broken = RuntimeError(GLOO)
    broken.__context__ = OutOfMemoryError("CUDA out of memory")
    assert failure_reason_of(broken) == "oom"


def test_a_chain_of_causes_with_a_loop_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    assert failure_reason_of(first) == "crash"


def test_a_full_disk_is_not_retried() -> None:
    assert exit_code_of(OSError(errno.ENOSPC, "full"), "disk-full") == 93
    assert exit_code_of(RuntimeError(GLOO), "communication") == 1
    assert exit_code_of(UsageError("x"), "usage") == 2


def test_a_failure_keeps_the_code_of_its_exception_and_records_of_earlier_versions_load(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    failure = failure_of(DivergedError(Reason("engine.loss-scale-at-floor", {"loss_scale": 1.0})), 2)
    assert (failure.reason, failure.exit_code) == ("nan", 93)
    assert (failure.code, failure.params) == ("engine.loss-scale-at-floor", {"loss_scale": 1.0})
    write_failure(run, 1, "rank-00002", failure)
    old = {"rank": 1, "reason": "oom", "message": "CUDA out of memory", "exit_code": 1, "node": "", "sure": True}
    (tmp_path / "attempts/0001/failures/rank-00001.json").write_text(json.dumps(old))
    assert read_failures(run, 1) == [Failure(1, "oom", "CUDA out of memory", 1), failure]


def test_a_failure_record_hides_secrets_in_its_message_and_its_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(tmp_path)
    spec = {"secret_env": ["LICENSE"], "checkpoint": {"dir": "auto"}}
    run.record.write_text(json.dumps({"spec": spec, "plan": {}}))
    monkeypatch.setenv("LICENSE", "abcd-1234")
    monkeypatch.setenv("STORE_PASSWORD", "correct horse")
    url = "s3://me:pw123456@store/data?license=abcd-1234"
    errors = (OSError(f"{url} refused 'correct horse'"), DivergedError(Reason("own.refused", {"urls": [{"url": url}]})))
    for rank_number, error in enumerate(errors):
        report_exception(run, 1, rank_number, error)
    records = [path.read_text() for path in (tmp_path / "attempts/0001/failures").iterdir()]
    for text in (*records, capsys.readouterr().err):
        assert "(not shown)" in text
        assert not [secret for secret in ("abcd-1234", "correct horse", "pw123456") if secret in text]


@pytest.mark.parametrize("record", ["", "[]", '{"spec": [], "plan": {}}', '{"spec": {"checkpoint": 1}, "plan": {}}'])
def test_a_failure_is_recorded_although_run_json_is_damaged(record: str, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.record.write_text(record)
    assert report_exception(run, 1, 0, DivergedError("step 3: loss nan")) == 93
    assert [failure.reason for failure in read_failures(run, 1)] == ["nan"]


def test_parameters_that_no_record_can_hold_do_not_lose_the_failure(tmp_path: Path) -> None:
    for value in (float("nan"), tmp_path, {1, 2}):
        failure = failure_of(DoNotRequeueError(Reason("own.diverged", {"loss": value})), 0)
        write_failure(RunDir(tmp_path), 1, "rank-00000", failure)
        assert read_failures(RunDir(tmp_path), 1) == [failure]
        assert (failure.code, failure.exit_code) == ("engine.failed", 93)


def test_the_message_of_an_attempt_has_the_notes_of_the_error_and_no_endless_text() -> None:
    error = OutOfMemoryError("CUDA out of memory")
    error.__notes__ = ["Most of it is activations."]  # type: ignore[attr-defined]
    message = judged([node(1, rank(0, 1))], failure_of(error, 0))[2]
    assert message.endswith("CUDA out of memory\nMost of it is activations.")
    assert len(str(failure_of(ValueError("x" * 10**6), 0).why)) < 10**4


def test_ordinary_text_has_no_failure_reason() -> None:
    for text in ("", "using gloo backend", "step 5 took 30 ms", "TypeError: xid() missing 1 argument"):
        assert reason_in(text) is None, text


def group(root: Path, cgroup: str, counter: str, kills: int) -> Path:
    """Return the root of a machine whose process is in that cgroup, with that counter file."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/vmstat").write_text("pgfault 12\noom_kill 40\n")
    file = root / counter
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"low 0\nhigh 0\nmax 8\noom 3\noom_kill {kills}\n")
    return root


def test_oom_kills_are_read_from_both_versions_of_cgroups(tmp_path: Path) -> None:
    two = group(tmp_path / "2", "0::/slurm/job_7\n", "sys/fs/cgroup/slurm/job_7/memory.events", 2)
    one = group(tmp_path / "1", "4:cpu,memory:/job_7\n0::/\n", "sys/fs/cgroup/memory/job_7/memory.oom_control", 3)
    inside = group(tmp_path / "c", "0::/host/path\n", "sys/fs/cgroup/memory.events", 4)
    assert [memory_kills(root) for root in (two, one, inside)] == [2, 3, 4]


def test_without_a_memory_cgroup_the_oom_kills_of_the_machine_count(tmp_path: Path) -> None:
    assert memory_kills(group(tmp_path / "m", "1:cpu:/\n", "elsewhere", 9)) == 40
    assert memory_kills(tmp_path / "nothing") is None


def test_the_agent_reports_a_rank_killed_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter([5, 6, 6])
    monkeypatch.setattr("scaletrain_cli.launch.node.watch.memory_kills", lambda: next(kills))
    diagnosis = ExitDiagnosis()
    killed = RankRecord(1, 7, 0.0).end(-9, 1.0, killed_by_agent=False)
    found = diagnosis.failure(killed, "node-0000-n0", tmp_path / "log")
    assert (found.rank, found.reason, found.node) == (1, "host-oom", "node-0000-n0")
    _, reason, message = judged([node(1, rank(1, -9))], found)
    assert reason == "host-oom"
    assert message.startswith("node-0000-n0: rank 1 was killed by the kernel")


def test_an_abort_is_explained_by_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "n0-00001.log"
    log.write_text("x" * 200_000 + "\nWatchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n")
    aborted = RankRecord(1, 7, 0.0).end(-6, 1.0, killed_by_agent=False)
    found = ExitDiagnosis().failure(aborted, "node-0000-n0", log)
    assert found.reason == "communication"
    assert ExitDiagnosis().failure(aborted, "node-0000-n0", tmp_path / "none") is None


def test_a_rank_that_a_real_time_signal_ends_has_a_record() -> None:
    assert RankRecord(1, 7, 0.0).end(-40, 1.0, killed_by_agent=False).signal == "signal 40"


def test_a_broken_connection_is_not_the_cause_if_another_rank_has_one() -> None:
    broken = Failure(0, "communication", GLOO, 1)
    first_to_end = node(1, rank(0, 1), ended=8.0)
    for other, failures, reason in (
        (node(1, rank(1, 1), number=1), [Failure(1, "crash", "ValueError: boo", 1)], "crash"),
        (node(1, rank(1, -9), number=1), [], "killed"),
        (node(1, rank(1, -11), number=1), [], "crash"),
        (node(93, rank(1, 93), number=1), [Failure(1, "nan", "loss nan", 93)], "nan"),
        (node(1, rank(1, 1), number=1), [Failure(1, "hardware", ECC, 1)], "hardware"),
    ):
        code, found, message = judged([first_to_end, other], broken, *failures, planned=2)
        assert (code, found) == (other.exit_code, reason)
        assert "rank 1 on node-0001-n1" in message
    assert judged([first_to_end], broken)[1] == "communication"
    assert judged([first_to_end, node(None, number=1)], broken, planned=2)[1] == "node"


def silent(number: int, **values: Any) -> Failure:
    """Return the record of a node of one rank at a hang."""
    where: dict[str, Any] = {
        "turn": 0,
        "step": 5,
        "phase": "step",
        "part": 1,
        "silent_seconds": 9.0,
        "state": "S",
        "responded": True,
    }
    name, code, params = f"node-{number:04d}-n{number}", "node.hung", {"silent_seconds": 9, "stacks": "stacks"}
    ranks = (RankView(number, **{**where, **values}),)
    return Failure(None, "hang", "no progress", 1, name, code=code, params=params, ranks=ranks)


def test_a_hang_is_judged_by_the_ranks_of_all_nodes_and_a_lost_node_wins_over_ranks_that_only_wait() -> None:
    nodes = [node(1, rank(n, -9, killed_by_agent=True), number=n, ended=9.0 + n) for n in range(3)]
    waits, behind, stopped = silent(0), silent(1, step=4), silent(2, state="T", responded=False)
    code, reason, message = judged(nodes, waits, behind, stopped, planned=3)
    assert (code, reason) == (1, "hang")
    assert "rank 2 on node-0002-n2 in step 5 does not respond: stopped by a signal (state T)" in message
    assert "rank 1 on node-0001-n1 is behind" in judged(nodes, waits, behind, silent(2), planned=3)[2]
    assert "no rank stands out" in judged(nodes, waits, silent(1), silent(2), planned=3)[2]
    gone = [*nodes[:2], node(None, number=2)]
    assert judged(gone, waits, behind, planned=3)[1] == "node"
    assert judged(nodes, waits, behind, stopped, Failure(1, "oom", "full", 1), planned=3)[1] == "oom"


def test_evidence_counts_against_the_node_that_it_names_only() -> None:
    two = [node(1, rank(0, 1), ended=8.0), node(1, rank(1, 1), number=1)]

    def against(*failures: Failure, nodes: list = two, planned: int = 2) -> tuple[str, ...]:  # type: ignore[type-arg]
        return classify_exit(nodes, failures, planned, cancelled=False).against

    assert against(Failure(1, "hardware", ECC, 1)) == ("n1",)
    assert against(silent(0), silent(1, state="T", responded=False)) == ("n1",)
    assert against(silent(0), silent(1, state="D", responded=False)) == ()  # the network file system may be the cause
    assert against(silent(0), silent(1, step=4)) == ()
    assert against(nodes=[two[0], node(None, number=1)]) == ("n1",)
    assert against(nodes=[node(None), node(None, number=1)]) == ()  # the job was ended, not a node
    never = classify_exit([two[0]], [], 2, cancelled=False, names=("n0", "n7"))
    assert (never.reason, never.against) == ("crash", ())  # it may have failed before the other came
    never = classify_exit([node(75, rank(0, 75))], [], 2, cancelled=False, names=("n0", "n7"))
    assert (never.reason, never.against) == ("node", ("n7",))
    assert never.why == Reason("launch.nodes-never-started", {"nodes": ["n7"]})
    refused = Failure(None, "wrong-nodes", "3 GPUs", 5, two[0].node)
    assert against(refused, nodes=[node(5)], planned=1) == ("n0",)
    for reason in ("crash", "oom", "host-oom", "nan", "communication"):
        assert against(Failure(1, reason, "x", 1)) == ()


def test_an_agent_whose_record_has_no_space_means_a_full_disk_and_not_a_lost_node() -> None:
    silent = [node(None), node(None, number=1)]
    full = classify_exit(silent, [], 2, cancelled=False, launcher_exit_code=93)
    assert (full.exit_code, full.reason, full.against) == (93, "disk-full", ())
    assert classify_exit(silent, [], 2, cancelled=False, launcher_exit_code=1).reason == "node"


def test_a_full_file_system_is_recognized_by_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert no_space(tmp_path) == ""
    assert not list(tmp_path.iterdir())
    assert no_space(tmp_path / "missing") == ""

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("scaletrain_cli.full_disk.create_file", full)
    assert no_space(tmp_path) == "Disk quota exceeded"
