"""The rendered job: the last submitted one, the differences of the next one, and its output formats."""

import json

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.backends.local.backend import LocalBackend
from scaletrain_cli.launch.submit import changes_since_sent, in_format, store_rendered_job, submit_run
from tests.cli.command_line import SMALL, scaletrain
from tests.launch.conftest import LOCAL, MakeRun

KUBERNETES = ("cluster.scheduler=kubernetes", "cluster.kubernetes.image=a/b:1", "cluster.kubernetes.runs.claim=runs")


def settings(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def test_a_submission_keeps_the_rendered_job(make_run: MakeRun) -> None:
    made = make_run()
    assert changes_since_sent(made.run, "a") is None
    submit_run(made.run, made.record, LOCAL)
    assert changes_since_sent(made.run, LOCAL.render(made.run, made.record)) == []


def test_changes_are_the_removed_and_added_lines_except_new_job_numbers(make_run: MakeRun) -> None:
    run = make_run().run
    store_rendered_job(run, 'name: llama-s1\nscaletrain.dev/submission: "1"\nnodes: 4\nimage: a\n')
    reported = changes_since_sent(run, 'name: llama-s2\nscaletrain.dev/submission: "2"\nnodes: 8\nimage: a\n')
    assert reported == ["-nodes: 4", "+nodes: 8"]


def test_a_batch_script_is_written_as_a_script_or_as_json_and_not_as_yaml() -> None:
    on_slurm = settings("cluster.scheduler=slurm")
    script = scaletrain("submit", SMALL, "--run-id", "a", "--dry-run", *on_slurm).out
    assert scaletrain("submit", SMALL, "--run-id", "a", "--output", "script", *on_slurm).out == script
    reported = scaletrain("submit", SMALL, "--run-id", "a", "--output", "json", *on_slurm).data
    assert (reported["scheduler"], reported["script"]) == ("slurm", script)
    assert scaletrain("submit", SMALL, "--output", "yaml", *on_slurm).code == 2
    with pytest.raises(UsageError, match="jobs of this machine have the format script"):
        in_format(LocalBackend(), "", "yaml")


def test_objects_are_written_as_yaml_or_as_a_list_for_kubectl() -> None:
    there = settings(*KUBERNETES)
    text = scaletrain("submit", SMALL, "--run-id", "a", "--output", "yaml", *there).out
    reported = json.loads(scaletrain("submit", SMALL, "--run-id", "a", "--output", "json", *there).out)
    kinds = [item["kind"] for item in reported["items"]]
    assert (reported["kind"], kinds) == ("List", ["ConfigMap", "JobSet"])
    assert text.count("\nkind: ") == len(kinds)


def test_resume_shows_the_changes_of_the_rendered_job(make_run: MakeRun) -> None:
    made = make_run("cluster.scheduler=slurm")
    store_rendered_job(made.run, "#!/bin/bash\n#SBATCH --nodes=9\n")
    reported = scaletrain("resume", made.run.run_id, "--dry-run", code=0)
    assert "-#SBATCH --nodes=9" in reported.err
    assert "+#SBATCH --nodes=1" in reported.err
