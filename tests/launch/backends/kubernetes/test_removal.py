"""`scaletrain rm` deletes the objects of an ended run with its run directory."""

import pytest

from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch.remove import plan_removal, remove
from tests.launch.backends.kubernetes.conftest import ended, put_pods
from tests.launch.backends.kubernetes.fake_api import FakeApi
from tests.launch.backends.kubernetes.test_backend import finish, submit, workload
from tests.launch.conftest import MadeRun


def test_the_objects_of_an_ended_run_are_deleted_with_it(made: MadeRun, api: FakeApi) -> None:
    name = submit(made)
    put_pods(api, ended(name, 0, 0), ended(name, 1, 0))
    with pytest.raises(UsageError, match="scaletrain cancel"):
        plan_removal(made.run, with_checkpoints=False)
    finish(api, name, "Completed")
    assert remove(plan_removal(made.run, with_checkpoints=False), with_checkpoints=False) == [name]
    assert not made.run.path.exists()
    assert api.deletions


def test_an_object_of_another_run_is_kept(made: MadeRun, api: FakeApi) -> None:
    name = submit(made)
    finish(api, name, "Completed")
    found = plan_removal(made.run, with_checkpoints=False)
    workload(api, name)["metadata"]["annotations"]["scaletrain.dev/run-id"] = "other"
    assert remove(found, with_checkpoints=False) == []
    assert workload(api, name)["metadata"].get("deletionTimestamp") is None


def test_a_run_is_kept_without_an_answer(made: MadeRun, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    name = submit(made)
    finish(api, name, "Completed")
    found = plan_removal(made.run, with_checkpoints=False)

    def silent(*arguments: object) -> None:
        raise SchedulerError("the API server does not answer.")

    monkeypatch.setattr("scaletrain_cli.launch.backends.kubernetes.backend.KubernetesBackend._observe", silent)
    with pytest.raises(SchedulerError, match="does not answer"):
        remove(found, with_checkpoints=False)
    assert made.run.record.exists()
