"""Losses of fine-tuning equal those of TRL, on the same model, rows and order; with adapters of PEFT, too."""

from pathlib import Path
from typing import Any

import pytest
import torch

from scaletrain_cli.engine.model.adapters import AdapterInitialization
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.spec import RunSpec
from tests.engine.model.adapted_models import NoBase, with_peft
from tests.engine.objectives.layouts import packed
from tests.engine.objectives.rows import (
    Course,
    examples,
    largest_difference,
    order,
    pairs,
    row_sequences,
    spec_of,
    train,
)
from tests.engine.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # those of TRL and its libraries

LIMIT = 1e-5  # relative, at each step
EXAMPLES, PAIRS = examples(40), pairs(40)
DPO_KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "sigmoid": ((), {"loss_type": "sigmoid"}),
    "robust": (
        ("training.dpo.loss=robust", "training.dpo.label_smoothing=0.1"),
        {"loss_type": "robust", "label_smoothing": 0.1},
    ),
    "ipo": (("training.dpo.loss=ipo",), {"loss_type": "ipo"}),
    "length normalized": (("training.dpo.length_normalized=true",), {"loss_type": "sigmoid_norm"}),
}


@pytest.fixture(scope="module")
def trl() -> Any:
    """Imported once a test needs it: that takes seconds."""
    from tests.engine.objectives import trl_runs

    return trl_runs


def test_losses_of_sft_are_those_of_trl(trl: Any, tmp_path: Path) -> None:
    spec = spec_of("training.objective=sft")
    (ours,) = on_ranks(1, train, spec, row_sequences([[example] for example in EXAMPLES]), tmp_path)
    theirs = trl.sft_losses(spec, [[EXAMPLES[i]] for i in order(spec, len(EXAMPLES))], tmp_path)
    assert largest_difference(ours.losses, theirs) < LIMIT
    assert ours.losses[-1] < 0.8 * ours.losses[0]


@pytest.mark.long
def test_losses_of_packed_sft_are_those_of_trl(trl: Any, tmp_path: Path) -> None:
    spec, rows = spec_of("training.objective=sft"), packed()
    (ours,) = on_ranks(1, train, spec, row_sequences(rows), tmp_path)
    theirs = trl.sft_losses(spec, [rows[i] for i in order(spec, len(rows))], tmp_path)
    assert largest_difference(ours.losses, theirs) < LIMIT


@pytest.mark.parametrize(
    "kind", ["sigmoid", *(pytest.param(kind, marks=pytest.mark.long) for kind in DPO_KINDS if kind != "sigmoid")]
)
def test_losses_and_measures_of_dpo_are_those_of_trl(trl: Any, kind: str, tmp_path: Path) -> None:
    overrides, settings = DPO_KINDS[kind]
    spec = spec_of("training.objective=dpo", "training.optimizer.lr=5.0e-4", "training.steps=8", *overrides)
    rows = row_sequences([[one] for pair in PAIRS for one in pair], is_pairs=True)
    ours: Course
    (ours,) = on_ranks(1, train, spec, rows, tmp_path)
    theirs = trl.dpo_run(spec, [PAIRS[i] for i in order(spec, len(PAIRS))], tmp_path / "trl", **settings)
    assert largest_difference(ours.losses, [line["loss"] for line in theirs]) < LIMIT
    for name in ours.measures[0]:
        first = 1 if name == "rewards/accuracies" else 0  # at first every margin is 0, up to rounding
        found, expected = ([step[name] for step in steps][first:] for steps in (ours.measures, theirs))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5), name
    assert ours.measures[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)


ADAPTER = ("model.adapter={name: lora, rank: 8, alpha: 16}", "training.optimizer.lr=2.0e-3", "training.steps=8")


def use_peft(trl: Any, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TRL train the adapter of the spec, with the first values of ours; its reference is the model without one."""
    plain, adapter, made = trl._model, spec.transformer.adapter, []
    values = AdapterInitialization(NoBase(), spec.training.seed, torch.device("cpu"), {})

    def model(spec: RunSpec, folder: Path) -> Any:
        base = plain(spec, folder)
        made.append(base)
        if len(made) > 1:
            return base
        theirs = with_peft(base, adapter, target_modules="all-linear")
        known = dict(theirs.named_parameters())
        with torch.no_grad():
            for parameter in model_parameters(spec.transformer):
                if parameter.adapter:
                    name = f"base_model.model.{parameter.name.removesuffix('.weight')}.default.weight"
                    known[name].copy_(values.read(parameter.name, parameter.shape, None))
        return theirs

    monkeypatch.setattr(trl, "_model", model)


def test_sft_with_an_adapter_has_the_losses_of_trl(trl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("training.objective=sft", *ADAPTER)
    (ours,) = on_ranks(1, train, spec, row_sequences([[example] for example in EXAMPLES]), tmp_path)
    use_peft(trl, spec, monkeypatch)
    theirs = trl.sft_losses(spec, [[EXAMPLES[i]] for i in order(spec, len(EXAMPLES))], tmp_path)
    assert largest_difference(ours.losses, theirs) < LIMIT
    assert ours.losses[-1] < ours.losses[0] - 0.01


def test_dpo_with_an_adapter_has_the_losses_of_trl(trl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("training.objective=dpo", *ADAPTER)
    rows = row_sequences([[one] for pair in PAIRS for one in pair], is_pairs=True)
    (ours,) = on_ranks(1, train, spec, rows, tmp_path)
    use_peft(trl, spec, monkeypatch)
    theirs = trl.dpo_run(spec, [PAIRS[i] for i in order(spec, len(PAIRS))], tmp_path / "trl", loss_type="sigmoid")
    assert largest_difference(ours.losses, [line["loss"] for line in theirs]) < LIMIT
    assert ours.losses[-1] < ours.losses[0] - 0.01
