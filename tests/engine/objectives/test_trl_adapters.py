"""Losses of fine-tuning with an adapter are those of TRL with PEFT, on the same model, rows and order."""

from pathlib import Path
from typing import Any

import pytest
import torch

from scaletrain_cli.engine.model.adapters import AdapterInitialization
from scaletrain_cli.plan.parameters import model_parameters
from scaletrain_cli.spec import RunSpec
from tests.engine.model.adapted_models import with_peft
from tests.engine.objectives.rows import largest_difference, order, row_sequences, spec_of, train
from tests.engine.objectives.test_trl import EXAMPLES, LIMIT, PAIRS
from tests.engine.objectives.test_trl import trl as trl
from tests.engine.ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # those of TRL and its libraries

ADAPTER = ("model.adapter={name: lora, rank: 8, alpha: 16}", "training.optimizer.lr=2.0e-3", "training.steps=8")


def use_peft(trl: Any, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TRL train the adapter of the spec, with the first values of ours; its reference is the model without one."""
    plain, adapter, made = trl._model, spec.transformer.adapter, []
    values = AdapterInitialization(_Nothing(), spec.training.seed, torch.device("cpu"), {})

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


class _Nothing:
    def read(self, name: str, whole_shape: tuple[int, ...], spec: object) -> torch.Tensor:
        raise AssertionError(name)


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
