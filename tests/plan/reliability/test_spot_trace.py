import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan import RunPlan, make_plan
from scaletrain_cli.plan.reliability.spot_trace import SpotTrace, read_trace, simulate
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from tests.plan.specs import ONE_LAYOUT, spec_of

HOUR = 3600.0


def run_of(days: float, *, grace_seconds: float = 0, nodes: int = 4) -> tuple[RunSpec, RunPlan]:
    """Return a run of ``days`` that restarts in 180 s and blocks 20 s for a checkpoint every 1,000 s."""
    run = {"cluster__spot": True, "cluster__price_per_gpu_hour": 2, "cluster__grace_seconds": grace_seconds}
    spec = spec_of("llama-7b", **{**ONE_LAYOUT, "cluster__nodes": nodes, **run})
    plan = make_plan(spec)
    durability = replace(
        plan.durability,
        interval_seconds=1000.0,
        blocked_seconds=20.0,
        restart_seconds=180.0,
        grace_ok=grace_seconds > 0,
    )
    return spec, replace(plan, durability=durability, time=replace(plan.time, to_train=days * 86400))


def trace_of(*intervals: tuple[float, int]) -> SpotTrace:
    return SpotTrace("trace", intervals)


def test_without_preemptions_only_the_start_and_checkpoints_take_time() -> None:
    spec, plan = run_of(days=10)
    outcome = simulate(spec, plan, trace_of((HOUR, 4)))
    wall = 180 + 10 * 86400 * 1.02
    assert outcome.days.median * 86400 == pytest.approx(wall)
    assert outcome.interruptions.median == outcome.waiting_hours.median == outcome.lost_hours.median == 0
    assert outcome.spot_usd.median == pytest.approx(2 * 32 * wall / 3600)
    assert (outcome.finished, outcome.starts) == (16, 16)


def test_each_loss_repeats_the_work_since_the_last_checkpoint() -> None:
    """An hour up, an hour down: 180 s to load, then 3 checkpoints of 1,020 s, then 360 s that are lost."""
    spec, plan = run_of(days=1)
    outcome = simulate(spec, plan, trace_of((HOUR, 4), (HOUR, 0)))
    rounds = 86400 / 3000
    assert outcome.days.median == pytest.approx(rounds * 2 / 24, rel=0.05)
    assert outcome.interruptions.median == pytest.approx(rounds, abs=1.5)
    assert outcome.lost_hours.median == pytest.approx(rounds * 360 / 1.02 / HOUR, rel=0.1)
    assert outcome.goodput.median == pytest.approx(3000 / 7200, rel=0.05)


def test_with_notice_no_work_is_lost() -> None:
    spec, plan = run_of(days=1, grace_seconds=120)
    outcome = simulate(spec, plan, trace_of((HOUR, 4), (HOUR, 0)))
    assert outcome.lost_hours.median == 0
    assert outcome.goodput.median == pytest.approx((3600 - 180 - 120) / 1.02 / 7200, rel=0.05)


def test_only_time_with_all_nodes_is_paid() -> None:
    spec, plan = run_of(days=1)
    outcome = simulate(spec, plan, trace_of((HOUR, 4), (HOUR, 3)))
    paid = outcome.days.median * 24 - outcome.waiting_hours.median
    assert outcome.spot_usd.median == pytest.approx(2 * 32 * paid, rel=0.02)


def test_spare_nodes_are_paid_as_in_the_plan() -> None:
    spec, plan = run_of(days=1)
    with_spare = spec.with_changes("cluster", spare_nodes=1)
    alone, more = (simulate(each, plan, trace_of((HOUR, 4))).spot_usd.median for each in (spec, with_spare))
    assert more == pytest.approx(5 / 4 * alone)
    assert make_plan(with_spare).cost.spot_usd == pytest.approx(5 / 4 * make_plan(spec).cost.spot_usd)


def test_a_job_with_spare_nodes_waits_for_them_too() -> None:
    spec, plan = run_of(days=1)
    with_spare = spec.with_changes("cluster", spare_nodes=1)
    outcome = simulate(with_spare, plan, trace_of((HOUR, 5), (HOUR, 4)))
    assert outcome.nodes_needed == 5
    assert outcome.interruptions.median > 0 == simulate(spec, plan, trace_of((HOUR, 5), (HOUR, 4))).interruptions.median


def test_skipping_repetitions_of_a_trace_gives_the_same_result() -> None:
    """A year on a trace of hours: skipping rounds changes nothing but the time it takes."""
    spec, plan = run_of(days=365)
    outcome = simulate(spec, plan, trace_of((5 * HOUR, 4), (HOUR, 0), (0.5 * HOUR, 4), (2 * HOUR, 1)))
    per_round = sum(math.floor((up - 180) / 1020) * 1000 for up in (5 * HOUR, 0.5 * HOUR))
    assert outcome.days.median == pytest.approx(365 * 86400 / per_round * 8.5 / 24, rel=0.002)
    assert outcome.repeats > 1000
    assert "plan.trace-repeats" in {note.code for note in outcome.notes}


def test_a_trace_continues_at_its_beginning() -> None:
    spec, plan = run_of(days=3)
    whole = simulate(spec, plan, trace_of((4 * HOUR, 4), (HOUR, 0)))
    cut = simulate(spec, plan, trace_of((1 * HOUR, 4), (HOUR, 0), (3 * HOUR, 4)))
    assert cut.interruptions.median == pytest.approx(whole.interruptions.median, abs=1)


def test_the_spread_is_ordered_and_deterministic() -> None:
    spec, plan = run_of(days=2)
    trace = trace_of((7 * HOUR, 4), (5 * HOUR, 2), (3 * HOUR, 4), (11 * HOUR, 0))
    outcome = simulate(spec, plan, trace)
    assert outcome.days.p10 < outcome.days.median < outcome.days.p90
    assert simulate(spec, plan, trace) == outcome


def test_a_trace_of_fewer_nodes_stands_for_the_whole_job() -> None:
    spec, plan = run_of(days=1)
    outcome = simulate(spec, plan, trace_of((HOUR, 1), (HOUR, 0)))
    assert outcome.nodes_assumed == Reason("plan.trace-of-fewer-nodes", {"most": 1, "needed": 4})
    assert "plan.trace-optimistic" in {note.code for note in outcome.notes}


def test_json_has_the_notes_as_texts_with_their_codes_beside_them() -> None:
    data = simulate(*run_of(days=1), trace_of((HOUR, 1), (HOUR, 0))).to_json()
    assert [reason["code"] for reason in data["note_reasons"]][:2] == ["plan.trace-optimistic", "plan.trace-repeats"]
    assert len(data["notes"]) == len(data["note_reasons"])
    assert (data["nodes_assumed_reason"]["params"], "at most 1" in data["nodes_assumed"]) == (
        {"most": 1, "needed": 4},
        True,
    )


def test_a_run_that_never_finishes_on_a_trace_is_an_error() -> None:
    spec, plan = run_of(days=1)
    with pytest.raises(UsageError, match="never finishes") as caught:
        simulate(spec, plan, trace_of((1000, 4), (HOUR, 0)))
    assert "leaves no time for a checkpoint" in str(caught.value)


def test_a_run_of_a_thousand_years_is_an_error_at_once() -> None:
    spec, plan = run_of(days=365, grace_seconds=120)
    with pytest.raises(UsageError, match="never finishes"):
        simulate(spec, plan, trace_of((300.0001, 4), (HOUR, 0)))


def test_a_trace_outcome_has_the_on_demand_cost_too() -> None:
    spec, plan = run_of(days=1)
    outcome = simulate(spec, plan, trace_of((HOUR, 4)))
    assert outcome.on_demand_usd == plan.cost.on_demand.usd


def test_json_is_read_plain_and_gzipped(tmp_path: Path) -> None:
    text = json.dumps({"metadata": {"gap_seconds": 600}, "data": [4, 4, 0, 3]})
    plain, packed = tmp_path / "a.json", tmp_path / "a.json.gz"
    plain.write_text(text, encoding="utf-8")
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_trace(plain).intervals == read_trace(packed).intervals == ((1200, 4), (600, 0), (600, 3))
    assert read_trace(plain).seconds == 2400


def test_csv_is_read_with_and_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    for header in ("", "seconds,nodes\n"):
        path.write_text(header + "0,4\n600,0\n900,4\n", encoding="utf-8")
        assert read_trace(path).intervals == ((600, 4), (300, 0), (300, 4))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "fewer than two points"),
        (b"{", "is not JSON"),
        (b"[1, 2]", "lacks metadata.gap_seconds"),
        (b'{"metadata": {"gap_seconds": 0}, "data": [1]}', "lacks metadata.gap_seconds"),
        (b'{"metadata": {"gap_seconds": 60}, "data": []}', "lacks data"),
        (b'{"metadata": {"gap_seconds": 60}, "data": [1, "x"]}', "data[1] is not a number of nodes"),
        (b'{"metadata": {"gap_seconds": 60}, "data": [1.5]}', "data[0] is not a number of nodes"),
        (b'{"metadata": {"gap_seconds": 60}, "data": [0, 0]}', "no node is available at any point"),
        (b'{"files": {"one.json": {}, "two.json": {}}}', "holds 2 traces"),
        (b"0,4\nsoon,3\n", "line 2 is not seconds,nodes"),
        (b"0,4\n0,3\n", "line 2 is not later than"),
        (b"0,4\n600,-1\n", "line 2 is not a number of nodes"),
        (b"\x1f\x8b broken", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_an_invalid_trace_is_one_error_with_a_reason(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_trace(path)
    assert said in str(caught.value)
    (problem,) = caught.value.problems
    assert problem.reason is not None
    assert caught.value.reason is not None


def test_a_missing_trace_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be used"):
        read_trace(tmp_path / "none.json")
