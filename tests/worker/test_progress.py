import json
import math

import pytest

from scaletrain_cli.worker.progress import progress_line, read_progress


def test_a_progress_line_is_read_back_with_its_numbers() -> None:
    line = progress_line(20, 100, 2.25, 12345.6)
    assert read_progress(line) == {"step": 20, "total_steps": 100, "loss": 2.25, "tokens_per_second": 12345.6}


@pytest.mark.parametrize(("unit", "name"), [("tokens", "tokens_per_second"), ("pairs", "samples_per_second")])
def test_a_progress_line_names_the_throughput_by_its_unit(unit: str, name: str) -> None:
    assert read_progress(progress_line(1, 2, 3.0, 640.0, unit)) == {
        "step": 1,
        "total_steps": 2,
        "loss": 3.0,
        name: 640.0,
    }


def test_a_loss_that_is_not_finite_is_left_out_and_the_line_stays_json() -> None:
    line = progress_line(1, 2, math.nan)
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None
    assert read_progress(line) == {"step": 1, "total_steps": 2}


def test_a_progress_line_of_any_program_gives_numbers_that_a_record_can_hold() -> None:
    line = '{"scaletrain": "progress", "step": 3, "loss": NaN, "tokens_per_second": Infinity, "ok": true, "lr": 0.5}'
    assert read_progress(line) == {"step": 3, "lr": 0.5}
    assert read_progress('{"scaletrain": ' + "[" * 100_000) is None
    assert "tokens_per_second" not in progress_line(1, 2, 1.0, math.inf)


@pytest.mark.parametrize(
    "line", ["step      1/2  loss 2.25", '{"scaletrain": "other", "step": 1}', '{"scaletrain": "prog', "", "{}"]
)
def test_any_other_line_is_not_a_progress_line(line: str) -> None:
    assert read_progress(line) is None
