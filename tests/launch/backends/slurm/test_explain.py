"""The meanings of Slurm's pending reasons, as a real Slurm printed them."""

import pytest

from scaletrain_cli.launch.backends.slurm import explain
from scaletrain_cli.launch.backends.slurm.explain import queue_reason, why_it_waits
from scaletrain_cli.launch.backends.slurm.tables import records
from scaletrain_cli.reasons import entry_of

SEEN = {
    "None": "resources",
    "Resources": "resources",
    "Priority": "priority",
    "BeginTime": "begin-time",
    "Dependency": "dependency",
    "DependencyNeverSatisfied": "dependency",
    "JobArrayTaskLimit": "dependency",
    "JobHeldUser": "held",
    "JobHeldAdmin": "held",
    "launch failed requeued held": "held",
    "PartitionConfig": "never",
    "PartitionNodeLimit": "never",
    "PartitionTimeLimit": "never",
    "BadConstraints": "never",
    "InvalidAccount": "never",
    "InvalidQOS": "never",
    "QOSMaxGRESPerJob": "never",
    "QOSMaxWallDurationPerJobLimit": "never",
    "AssocGrpGRES": "quota",
    "AssocGrpCpuLimit": "quota",
    "QOSGrpNodeLimit": "quota",
    "QOSMaxJobsPerUserLimit": "quota",
    "PartitionDown": "maintenance",
    "Reservation": "maintenance",
    "ReqNodeNotAvail, Reserved for maintenance": "maintenance",
    "ReqNodeNotAvail,_UnavailableNodes:n18": "node",
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions": "node",
    "Licenses": "resources",
}
# Words of Slurm 22.05 to 25.11 that no recorded job had, from the names in its source.
LISTED = {
    "SchedDefer": "resources",
    "JobHoldMaxRequeue": "held",
    "QOSMinGRES": "never",
    "QOSMinMemory": "never",
    "QOSMaxGRESPerNode": "never",
    "AssocMaxMemPerNode": "never",
    "AssocMaxWallDurationPerJobLimit": "never",
    "MaxMemPerLimit": "never",
    "ReservationInvalid": "never",
    "AssocGrpJobsLimit": "quota",
    "MaxGRESPerAccount": "quota",
    "MaxGRESRunMinsPerUser": "quota",
    "MaxJobsPerAccount": "quota",
    "QOSUsageThreshold": "quota",
    "BurstBufferStageIn": "resources",
    "Constraints": "resources",
    "MaxPoweredUpNodes": "resources",
    "MpiPortsBusy": "resources",
    "NvidiaImexChannels": "resources",
}


@pytest.mark.parametrize(("word", "cause"), [*SEEN.items(), *LISTED.items()], ids=[*SEEN, *LISTED])
def test_each_reason_has_its_cause(word: str, cause: str) -> None:
    assert queue_reason(word).cause == cause


def test_reasons_that_never_pass_need_action_and_have_remedies() -> None:
    for word in SEEN:
        reason = queue_reason(word)
        assert reason.needs_action == (reason.cause in ("never", "held") or word == "DependencyNeverSatisfied")
        assert entry_of(reason.code).remedies or reason.cause in ("priority", "begin-time", "dependency", "resources")


def test_an_unknown_reason_of_slurm_is_reported_as_it_is() -> None:
    assert queue_reason("SomethingNew").cause == "unknown"
    assert queue_reason("(SomethingNew)").code == "slurm.wait-unknown"


def test_fields_may_contain_blanks_and_equals_signs_or_be_empty() -> None:
    (found,) = records(
        "JobId=7 JobName=a-1 Reason=Nodes required for job are DOWN Dependency=(null) TRES=cpu=2,node=1 Licenses= "
        "Comment=x\n"
    )
    assert found["Reason"] == "Nodes required for job are DOWN"
    assert found["TRES"] == "cpu=2,node=1"
    assert (found["Licenses"], found["Comment"], found["Dependency"]) == ("", "x", "(null)")
    assert list(records("")) == []


def test_nodes_that_do_not_respond_are_not_counted_as_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "scontrol": "JobId=7 JobState=PENDING Reason=Resources Partition=main",
        "sinfo": "2|idle\n3|idle*\n1|mix\n4|drain\n",
        "squeue": "7\n",
    }

    def call(command: list[str], **_: object) -> object:
        return type("Answer", (), {"stdout": answers[command[0]]})

    monkeypatch.setattr(explain, "call_slurm", call)
    evidence = {one.source: one.params for one in why_it_waits("7", "a-1").evidence}
    assert evidence["sinfo, partition main"] == {"counts": "2 idle, 3 idle*, 1 mix, 4 drain", "usable": 3}
