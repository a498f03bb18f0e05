from pathlib import Path
from unittest.mock import ANY

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.plan.advice.answer import compare, name_runs, none_feasible
from scaletrain_cli.spec import RunSpec
from tests.plan.specs import spec_of


def names(*runs: tuple[str, tuple[str, ...], RunSpec]) -> list[str]:
    return [name for name, _ in name_runs([(Path(path), overrides, spec) for path, overrides, spec in runs])]


def test_runs_are_named_by_what_differs() -> None:
    one = spec_of("gpt2")
    two = one.model_copy(update={"name": "other"})
    assert names(("a.yaml", (), one), ("b.yaml", (), two)) == ["test", "other"]
    assert names(("a.yaml", (), one), ("b.yaml", (), one)) == ["a", "b"]
    assert names(("x/run.yaml", (), one), ("y/run.yaml", (), one)) == ["x/run.yaml", "y/run.yaml"]
    assert names(("a.yaml", ("layout.zero_stage=1",), one), ("a.yaml", ("layout.zero_stage=3",), one)) == [
        "zero_stage=1",
        "zero_stage=3",
    ]
    assert names(("a.yaml", ("name=x",), one), ("b.yaml", ("name=x",), two))[0] == "test name=x"


def test_a_run_that_does_not_fit_has_a_reason_and_the_others_a_plan() -> None:
    fits, too_large, odd = compare(
        [
            ("small", spec_of("gpt2"), None),
            ("large", spec_of("llama-70b"), None),
            ("odd", spec_of("gpt2", layout__data_parallel=3), None),
        ]
    )
    assert (fits.feasible, fits.reason) == (True, None)
    assert too_large.plan is not None
    assert too_large.reason.code == "plan.run-does-not-fit"
    assert odd.plan is None
    assert "layout.data_parallel = 3" in str(odd.reason)
    assert odd.to_json() == {
        **{"name": "odd", "feasible": False, "reason": str(odd.reason), "code": "plan.cluster-does-not-divide"},
        **{"params": ANY, "plan": None, "problems": ANY},
    }
    assert none_feasible([fits, odd]) is None
    error = none_feasible([too_large, odd])
    assert error.exit_code == ExitCode.INFEASIBLE
