"""Code that no ConfigMap can hold reaches the pods from object storage: a real S3 server (moto) on this machine."""

import random
from pathlib import Path

import pytest

from scaletrain_cli.data.sources import places
from scaletrain_cli.errors import ExitCode, ScaletrainError
from scaletrain_cli.launch.backends.kubernetes.backend import KubernetesBackend
from scaletrain_cli.launch.backends.kubernetes.code_store import code_url, fetch_code, upload_code
from scaletrain_cli.launch.backends.kubernetes.manifest import documents_for, has_archive, manifest
from scaletrain_cli.launch.submit import submit_run
from scaletrain_cli.rundir.record import code_file, documents_of, place_documents
from tests.data.remote.conftest import BUCKET, s3, s3_server  # noqa: F401
from tests.data.remote.faults import FaultyProxy
from tests.launch.backends.kubernetes.conftest import SETTINGS
from tests.launch.backends.kubernetes.fake_api import FakeApi
from tests.launch.backends.kubernetes.pods import put_documents
from tests.launch.backends.kubernetes.test_rendered_pods import OPTIONS, run_pods
from tests.launch.conftest import MadeRun, MakeRun
from tests.launch.working_tree import WorkingTree

STORE = f"s3://{BUCKET}/code/of-runs/"
PROGRAM = "import os\nprint('submitted, as', os.environ['RANK'])\n"


@pytest.fixture
def large(tree: WorkingTree, make_run: MakeRun) -> MakeRun:
    """Return a function that makes a run whose packed code takes more than a ConfigMap may hold."""

    def make(*settings: str) -> MadeRun:
        tree.write("train.py", PROGRAM)
        tree.write("table.txt", random.Random(7).randbytes(1_200_000).hex())
        return make_run(*settings, f"code.path={tree.folder}", "code.engine=train")

    return make


def test_small_code_is_in_the_config_map_also_with_a_store(tree: WorkingTree, make_run: MakeRun) -> None:
    made = make_run(*OPTIONS, f"code.path={tree.folder}", "code.engine=train", f"cluster.kubernetes.code_store={STORE}")
    assert has_archive(documents_for(made.run, made.record))


def test_large_code_without_a_store_is_refused_with_the_key_of_the_store(large: MakeRun) -> None:
    made = large(*OPTIONS)
    with pytest.raises(ScaletrainError) as refused:
        manifest(made.record, documents_for(made.run, made.record))
    assert refused.value.reason.code == "kubernetes.code-too-large"
    assert "cluster.kubernetes.code_store" in " ".join(refused.value.reason.remedies)


def test_pods_run_the_code_from_the_store(
    large: MakeRun,
    tmp_path: Path,
    s3: FaultyProxy,  # noqa: F811
) -> None:
    made = large(*OPTIONS, f"cluster.kubernetes.code_store={STORE}")
    documents = documents_for(made.run, made.record)
    assert not has_archive(documents)
    assert upload_code(made.run, made.record) == f"{STORE}{made.record.code.sha256}.tar.gz"  # type: ignore[union-attr]
    output = run_pods(manifest(made.record, documents), "jobset", tmp_path)
    assert "rank 0: submitted, as 0" in output[0]
    assert "rank 3: submitted, as 3" in output[1]


def test_the_same_code_is_uploaded_once(large: MakeRun, s3: FaultyProxy) -> None:  # noqa: F811
    made = large(*OPTIONS, f"cluster.kubernetes.code_store={STORE}")
    for _ in range(2):
        upload_code(made.run, made.record)
    assert [request.method for request in s3.seen].count("PUT") == 1


def test_a_damaged_archive_of_the_same_size_is_replaced(
    large: MakeRun,
    s3: FaultyProxy,  # noqa: F811
) -> None:
    made = large(*OPTIONS, f"cluster.kubernetes.code_store={STORE}")
    content = code_file(made.run, made.record.code, "tar.gz").read_bytes()
    url = code_url(made.record)
    places.write_file(url, content[:-100] + bytes(100))
    upload_code(made.run, made.record)
    assert places.read_all(url) == content


def test_a_submission_uploads_the_code_before_it_creates_anything(
    large: MakeRun,
    api: FakeApi,
    s3: FaultyProxy,  # noqa: F811
) -> None:
    made = large(*SETTINGS, f"cluster.kubernetes.code_store={STORE}")
    submit_run(made.run, made.record, KubernetesBackend())
    (config_map,) = api.all("configmaps")
    assert "binaryData" not in config_map or not has_archive(config_map["binaryData"])
    url = code_url(made.record)
    assert places.read_all(url) == code_file(made.run, made.record.code, "tar.gz").read_bytes()


def test_a_submission_without_access_to_the_store_creates_nothing(
    large: MakeRun,
    api: FakeApi,
    s3: FaultyProxy,  # noqa: F811
) -> None:
    made = large(*SETTINGS, f"cluster.kubernetes.code_store={STORE}")
    s3.fault = lambda request: "denied"
    with pytest.raises(ScaletrainError) as refused:
        submit_run(made.run, made.record, KubernetesBackend())
    assert refused.value.exit_code == ExitCode.USAGE
    assert api.objects == {}
    s3.fault = lambda request: None
    submit_run(made.run, made.record, KubernetesBackend())
    assert len(api.all("jobsets")) == 1


def test_an_archive_that_was_changed_in_the_store_does_not_run(
    large: MakeRun,
    tmp_path: Path,
    s3: FaultyProxy,  # noqa: F811
) -> None:
    from scaletrain_cli.launch.node.attempt import place_code

    made = large(*OPTIONS, f"cluster.kubernetes.code_store={STORE}")
    url = code_url(made.record)
    places.write_file(url, b"another archive")
    documents = {**documents_of(made.run, made.record), **documents_for(made.run, made.record)}
    run, _ = place_documents(put_documents(documents, tmp_path / "documents"), tmp_path / "volume")
    fetch_code(run, made.record)
    with pytest.raises(ScaletrainError) as refused:
        place_code(run, made.record, tmp_path / "unpacked")
    assert refused.value.exit_code == ExitCode.USAGE
