from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_loops.gpu_table import MODELS, Case, catalogue_name, recipe_of
from engine_loops.paired import check_same_data, check_same_work
from engine_loops.rivals import Loop, elements_of, model_of
from engine_speed import RECIPE, ratios

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.architecture import parameter_count
from scaletrain_cli.spec import load_spec


def test_a_steady_drift_cancels() -> None:
    """The other program and the engine alternate on a machine that becomes slower and slower."""
    moments = iter(range(100, 120))
    theirs, ours = [], []
    for _ in range(5):
        theirs.append([float(next(moments)), 0.0])
        ours.append([1.1 * next(moments), 0.0])
    assert ratios(ours[:-1], theirs, 0) == pytest.approx([1.1] * 4)


def test_a_loop_that_trains_on_other_tokens_is_no_rival() -> None:
    """Untrained weights have nearly the same loss on any tokens: 8.37 for a vocabulary of 4,096."""
    check_same_data(8.37, 5, "fp32", {"DDP": Loop(lambda _: [], lambda _: [], 5, first_loss=8.37003)})
    with pytest.raises(RuntimeError, match=r"DDP begins with loss 8\.375"):
        check_same_data(8.37, 5, "fp32", {"DDP": Loop(lambda _: [], lambda _: [], 5, first_loss=8.375)})


def test_a_loop_with_a_head_of_its_own_beside_a_tied_one_is_no_rival() -> None:
    with pytest.raises(RuntimeError, match="DDP trains 7 elements and the engine 5"):
        check_same_data(8.37, 5, "fp32", {"DDP": Loop(lambda _: [], lambda _: [], 7, first_loss=8.37)})


def test_the_model_of_a_rival_ties_its_head_as_the_engine_does() -> None:
    import torch

    from scaletrain_cli.engine.model import outline

    spec = load_spec(RECIPE)
    assert spec.transformer.tie_word_embeddings
    own = outline(spec.transformer).to_empty(device="cpu")
    own.tie()
    context = SimpleNamespace(spec=spec, device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(context=context, composed=SimpleNamespace(model=own))
    assert elements_of(model_of(trainer)) == elements_of(own) == parameter_count(spec.transformer)


def test_a_loop_that_does_not_clip_or_follow_the_schedule_does_not_do_the_same_work() -> None:
    lines = [{"step": step, "loss": 8.0 - step, "grad_norm": 2.0, "learning_rate": 1e-3} for step in range(1, 4)]
    check_same_work(lines, lines, "fp32")
    for name, value in (("loss", 6.99), ("learning_rate", 2e-3), ("grad_norm", 1.0)):
        with pytest.raises(RuntimeError, match=f"step 1: {name}"):
            check_same_work(lines, [lines[0] | {name: value}, *lines[1:]], "fp32")


@pytest.mark.parametrize(("name", "billions"), [("0.2B", 0.187), ("1B", 1.236), ("3B", 3.213), ("8B", 8.030)])
def test_the_models_have_the_sizes_in_their_names(name: str, billions: float, tmp_path: Path) -> None:
    path = recipe_of(name, "h200-sxm-141gb", tmp_path)
    spec = load_spec(path, Case(name, compiled=True, checkpointing="full").overrides)
    assert parameter_count(spec.transformer) / 1e9 == pytest.approx(billions, abs=0.001)
    assert spec.transformer.seq_len == 4096
    assert set(MODELS) == {"0.2B", "1B", "3B", "8B"}


def test_a_gpu_is_known_by_its_product_name_and_memory() -> None:
    assert catalogue_name("NVIDIA H200", 150_100_000_000) == "h200-sxm-141gb"
    assert catalogue_name("NVIDIA A100-SXM4-40GB", 42_400_000_000).startswith("a100-")
    assert catalogue_name("NVIDIA A100-SXM4-40GB", 42_400_000_000).endswith("-40gb")
    assert catalogue_name("NVIDIA H100 80GB HBM3", 85_000_000_000) == "h100-sxm-80gb"
    with pytest.raises(UsageError, match="Radeon"):
        catalogue_name("AMD Radeon", 8_000_000_000)
