"""`scaletrain preflight` on this machine: output, remaining files, and the exit code for an unfit node."""

from pathlib import Path

import pytest

from scaletrain_cli.launch.short_jobs import Preflight
from scaletrain_cli.rundir.paths import runs_root
from scaletrain_cli.ui.short_jobs import show_preflight
from tests.cli.command_line import SMALL, scaletrain


@pytest.mark.drill
@pytest.mark.long  # tests/engine/health/test_preflight.py measures ranks without the command
def test_preflight_measures_all_links_and_leaves_no_files() -> None:
    own = ("--set", "code.engine=mine.train")  # whatever is to train afterwards, it is this engine that measures
    done = scaletrain("preflight", SMALL, *own, "--yes", "--json", code=0)
    assert [rank["rank"] for rank in done.data["ranks"]] == [0, 1]
    assert all(rank["flops"] > 0 for rank in done.data["ranks"])
    assert done.data["all_reduce_seconds"] > 0
    assert [node["problems"] for node in done.data["nodes"]] == [[]]
    assert list(runs_root().iterdir()) == []


def test_a_plan_that_the_engine_cannot_run_is_rejected_before_anything_is_queued() -> None:
    assert scaletrain("preflight", SMALL, "--yes", "--timeout", "soon").code == 2
    assert not runs_root().exists()


def test_preflight_names_an_unfit_node_in_its_table_and_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    rank = {"rank": 0, "node": "n7", "device": "H100", "free_bytes": 8e10, "total_bytes": 85e9, "flops": 6e14}
    bad = {"rank": 0, "node": "n7", "message": "its network moves 2 GB/s", "keeps_off": True}
    node = {"node": "node-0000-n7", "problems": ["GPU 1 waits for a reset"], "notes": ["its clock is 40 s behind"]}
    ranks = ({**rank, "links": [2e9, 40e9]},)
    show_preflight(
        Preflight(5, "attempt 1 ended with 5", ranks, (bad,), (node,), 0.2, 0.01, Path("/runs/.preflight-1"))
    )
    assert capsys.readouterr().out.splitlines() == [
        "rank  node  device     free  TFLOP/s  links",
        "   0  n7    H100    80.0 GB      600  2.00 GB/s, 40.0 GB/s",
        "all-reduce over all ranks: 200 ms, planned 10.0 ms",
        "bad   node-0000-n7: GPU 1 waits for a reset",
        "note  node-0000-n7: its clock is 40 s behind",
        "bad   rank 0 on n7: its network moves 2 GB/s",
        "attempt 1 ended with 5",
        "the run directory is kept in /runs/.preflight-1",
    ]
