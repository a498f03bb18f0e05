import os
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from scaletrain_cli.data.sources import places
from scaletrain_cli.diagnosis.rehearsal import Options
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch import short_jobs
from scaletrain_cli.launch.drill import drill_spec
from scaletrain_cli.launch.resource_checks import hub as mirror_checks
from scaletrain_cli.launch.resource_checks.checks import check_external
from scaletrain_cli.launch.resource_checks.hub import check_mirror
from scaletrain_cli.launch.resource_checks.view import CheckResults, View
from scaletrain_cli.launch.short_jobs import rehearsal_spec
from scaletrain_cli.mirror.object_store import ObjectStore
from scaletrain_cli.spec import RunSpec
from tests.cli.command_line import SMALL, scaletrain
from tests.data.remote.conftest import BUCKET
from tests.data.remote.faults import FaultyProxy
from tests.launch.conftest import LOCAL, make_plan, make_spec
from tests.mirror.conftest import PLACE


def checked(to: str, *overrides: str, env: dict[str, str] | None = None) -> CheckResults:
    spec = make_spec(f"checkpoint.mirror={to}", *overrides, env=env)
    return check_mirror(View(spec, Path.cwd(), os.environ))


def code_of(results: CheckResults) -> str:
    (problem,) = results.problems
    assert problem.key == "checkpoint.mirror.to"
    cause = problem.reason.params.get("cause")
    return cause.code if cause is not None else problem.reason.code


def test_a_mirror_that_can_be_written_to_passes_and_keeps_nothing_of_the_check(s3: FaultyProxy) -> None:
    assert checked(PLACE) == CheckResults()
    assert any(request.method == "PUT" for request in s3.seen)
    assert ObjectStore(f"s3://{BUCKET}").list("mirror") == {}
    assert check_external(make_spec(f"checkpoint.mirror={PLACE}")).problems == ()


def test_a_missing_right_is_a_problem(s3: FaultyProxy) -> None:
    s3.fault = lambda request: "denied" if request.method == "PUT" else None
    assert code_of(checked(PLACE)) == "remote.denied"


def test_a_missing_bucket_is_a_problem(s3: FaultyProxy) -> None:
    assert code_of(checked("s3://not-there/mirror")) == "remote.no-bucket"


def test_the_endpoint_of_the_run_is_used(s3: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(places.TIMEOUT, "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert code_of(checked(PLACE)) == "remote.unavailable"
    assert checked(PLACE, env={"AWS_ENDPOINT_URL": s3.url}) == CheckResults()
    assert os.environ["AWS_ENDPOINT_URL"] == "http://127.0.0.1:9"


def test_credentials_that_only_the_nodes_have_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(PLACE, "cluster.scheduler=slurm", "cluster.slurm={partition: gpu}")
    assert found.problems == ()
    (note,) = found.warnings
    assert note.params["cause"].code == "remote.no-credentials"
    assert code_of(checked(PLACE)) == "remote.no-credentials"


def test_a_missing_library_is_a_problem_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, ModuleSpec | None] = {}
    monkeypatch.setattr(mirror_checks, "find_spec", found.get)
    results = checked(PLACE)
    assert code_of(results) == "mirror.no-library"
    assert "remote" in str(results.problems[0].hint)


def test_a_folder_must_be_writable_and_outside_the_runs_root(tmp_path: Path) -> None:
    assert checked(f"{tmp_path}/other-disk") == CheckResults()
    assert code_of(checked(f"{tmp_path}/runs/mirror")) == "mirror.inside-run"
    (tmp_path / "file").touch()
    assert code_of(checked(f"{tmp_path}/file/mirror")) == "checks.checkpoints-no-folder"


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("s3://", "must name one bucket"),
        ("s3://bucket/run-*", "without wildcards"),
        ("https://host/bucket", "must be in a store that can be written to"),
        ("ftp://host/bucket", "must be in a store that can be written to"),
        ("mirrors", "must be an absolute path"),
        ("s3://key@bucket/mirror", "must not contain a user name"),
        ("s3://me:hunter2secret@bucket/mirror", "must not contain a user name"),
        ("s3://bucket/mirror?X-Amz-Signature=0", "must not contain a user name, a password or a signature"),
    ],
)
def test_a_malformed_address_is_a_problem_of_its_line(to: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(SMALL.read_text().replace("keep: 3}", f"keep: 3, mirror: '{to}'}}"))
    ended = scaletrain("validate", path, code=2)
    assert "spec.yaml:36 checkpoint.mirror" in ended.err
    assert said in " ".join(ended.err.split())
    assert "hunter2secret" not in ended.out + ended.err


def test_the_schema_takes_both_forms_and_the_table_needs_a_place(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    for form in (f"'{tmp_path}/m'", f"{{to: '{tmp_path}/m', keep: 5, bandwidth: 20MB/s, every: 100}}"):
        path.write_text(SMALL.read_text().replace("keep: 3}", f"keep: 3, mirror: {form}}}"))
        assert scaletrain("validate", path).code == 0
    path.write_text(SMALL.read_text().replace("keep: 3}", "keep: 3, mirror: {keep: 5}}"))
    assert "checkpoint.mirror.keep" in scaletrain("validate", path).err


def test_jobs_that_only_try_a_run_have_no_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path / "runs"))
    spec = make_spec(f"checkpoint.mirror={{to: {tmp_path}/other-disk, keep: 5}}")
    assert rehearsal_spec(spec, Options()).checkpoint.mirror.to is None
    assert drill_spec(spec, 12).checkpoint.mirror.to is None
    tried: list[RunSpec] = []

    def refuse(spec: RunSpec, *_: object, **__: object) -> None:
        tried.append(spec)
        raise UsageError("refused")

    monkeypatch.setattr(short_jobs, "create_run", refuse)
    with pytest.raises(UsageError, match="refused"):
        short_jobs.run_preflight(spec, make_plan(spec), LOCAL, 0.0, lambda status: None)
    assert [each.checkpoint.mirror.to for each in tried] == [None]
