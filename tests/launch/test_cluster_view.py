"""The cluster view: the same rows from the output of a real Slurm and from runs on this machine."""

import dataclasses
from pathlib import Path

import pytest

from scaletrain_cli.launch.backends.cluster_view import GpuRow, NodesRow
from scaletrain_cli.launch.backends.local.backend import LocalBackend, local_view
from scaletrain_cli.launch.backends.slurm.explain import make_view
from scaletrain_cli.launch.backends.slurm.tables import limits_of
from scaletrain_cli.spec import ClusterSpec
from scaletrain_cli.ui.tables import show_cluster
from tests.cli.command_line import scaletrain
from tests.launch.backends.slurm.test_preflight import SITE
from tests.launch.backends.slurm.test_tables import answer
from tests.launch.conftest import MakeRun

LIMITS = limits_of(answer("assoc_mgr"), user="root", uid=0, account="lab", qos=["normal"])
VIEW = make_view(dataclasses.replace(SITE, limits=LIMITS), answer("queue"))


def test_gpus_are_counted_by_type_and_those_of_drained_nodes_are_not_free() -> None:
    assert VIEW.gpus == (GpuRow("h100", total=24, used=8, free=8, out_of_order=8, nodes=3, free_nodes=1),)
    assert VIEW.nodes == (NodesRow("mix", 1), NodesRow("idle", 1), NodesRow("drain", 1))
    assert VIEW.notes == ("out of order: n3 drain",)


def test_jobs_of_the_user_are_listed_with_the_jobs_ahead_and_the_reason_they_wait() -> None:
    running, first, second = VIEW.queue
    assert (running.job_id, running.state, running.gpus, running.ahead) == ("2400011", "running", 8, None)
    assert (first.name, first.gpus, first.ahead, first.reason) == ("mine2", 16, 0, "AssocGrpGRES")
    assert (second.ahead, second.start, second.reason[:24]) == (1, None, "Nodes required for job a")


def test_jobs_of_others_are_counted_and_come_before_mine_by_priority() -> None:
    lines = (
        answer("queue") + "9|ada|PENDING|Priority|5000|1|N/A|N/A|main|x\n8|ada|PENDING|Priority|10|1|N/A|N/A|main|y\n"
    )
    lines += "7|ada|RUNNING|None|1|1|N/A|N/A|main|z\n6|ada|PENDING|Priority|9999|1|N/A|N/A|high|w\n"
    view = make_view(SITE, lines)
    assert (view.others_running, view.others_queued) == (1, 3)
    assert [row.ahead for row in view.queue if row.state == "queued"] == [1, 2]
    assert len(view.queue) == 3


def test_jobs_of_the_user_that_neither_run_nor_wait_for_nodes_are_listed_too() -> None:
    states = ("COMPLETING", "REQUEUE_HOLD", "RESIZING", "STOPPED")
    lines = [f"{number}|root|{state}|None|1|1|N/A|N/A|main|x\n" for number, state in enumerate(states)]
    shown = [(row.state, row.ahead) for row in make_view(SITE, "".join(lines)).queue]
    assert shown == [("ending", None), ("queued", None), ("running", None), ("suspended", None)]


def test_a_job_name_with_separators_does_not_shift_the_columns() -> None:
    (row,) = make_view(SITE, "1|root|PENDING|None|1|2|gres:gpu:4|N/A|main|a|b\n").queue
    assert (row.name, row.gpus, row.queue) == ("a|b", 8, "main")


def test_quotas_are_shown_with_their_use() -> None:
    rows = {(row.owner, row.limit): row for row in VIEW.quotas}
    gpus = rows["account lab", "GrpTRES"]
    assert (gpus.resource, gpus.allowed, gpus.used) == ("GPUs", 16.0, 8.0)


def test_the_json_is_the_same_for_every_scheduler() -> None:
    local = LocalBackend().cluster_view(ClusterSpec()).to_json()
    assert local["schema"] == "scaletrain.cluster/v1"
    assert local.keys() == VIEW.to_json().keys()
    assert local["gpus"][0].keys() == VIEW.to_json()["gpus"][0].keys()


def test_gpus_of_this_machine_have_the_names_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    card = tmp_path / "0000:00:04.0" / "information"
    card.parent.mkdir()
    card.write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 17\n")
    (row,) = local_view(lambda run, record: None, tmp_path).gpus
    assert (row.type, row.total, row.free) == ("NVIDIA H100 80GB HBM3", 2, 2)


def test_an_ended_local_run_uses_no_gpus(make_run: MakeRun) -> None:
    make_run()
    assert LocalBackend().cluster_view(ClusterSpec()).queue == ()


def test_the_table_fits_eighty_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaletrain_cli.ui.console._PIPED", 80)
    show_cluster(VIEW, now=0.0)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines()[:12])) <= 80
    assert "h100     8     8            8     24      3           1" in shown
    assert "account lab                  8     8       16  GPUs (GrpTRES)" in shown


def test_status_cluster_shows_the_requested_cluster() -> None:
    shown = scaletrain("status", "--cluster", "--scheduler", "local", "--json")
    assert (shown.code, shown.data["scheduler"]) == (0, "local")
    titles = scaletrain("status", "--cluster", "--scheduler", "local").out.splitlines()[2]
    assert titles.split()[:3] == ["GPUs", "free", "used"]


@pytest.mark.parametrize("words", [("--cluster", "r1"), ("--cluster", "--wait", "1s"), ("--scheduler", "slurm")])
def test_options_of_status_cluster_that_contradict_each_other_are_rejected(words: tuple[str, ...]) -> None:
    assert scaletrain("status", *words).code == 2


def test_an_unknown_scheduler_is_rejected_with_the_known_ones() -> None:
    refused = scaletrain("status", "--cluster", "--scheduler", "pbs")
    assert (refused.code, "Use local, slurm or kubernetes" in refused.err) == (2, True)


def test_a_cluster_of_the_clusters_file_is_shown_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "clusters.yaml"
    file.write_text("clusters:\n  here: {scheduler: local}\n  typo: {scheduler: locale}\n")
    monkeypatch.setenv("SCALETRAIN_CLUSTERS", str(file))
    assert scaletrain("status", "--cluster", "here", "--json").data["scheduler"] == "local"
    assert "cluster here uses local" in scaletrain("status", "--cluster", "here", "--scheduler", "slurm").err
    refused = scaletrain("status", "--cluster", "typo")
    assert (refused.code, "clusters.yaml:3 cluster.scheduler = locale" in refused.err) == (2, True)
    assert scaletrain("status", "--cluster", "there").code == 2
