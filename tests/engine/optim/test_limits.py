import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scaletrain_cli.engine.deepspeed_engine import offload_config, precision_config, prepare_deepspeed
from scaletrain_cli.engine.model.vision.clip import Clip
from scaletrain_cli.engine.optim.optimizers import LIMITS, keep_within_limits, parameter_groups
from scaletrain_cli.plan.trained_parameters import Phase, Settings, Stage
from scaletrain_cli.spec.training import OptimizerSpec
from scaletrain_cli.spec.vision_model import ClipSpec
from tests.engine.optim.small_engine import layout_of, run_spec
from tests.engine.ranks import on_ranks

LARGEST = math.log(100)
SLOPES = (-1.0, -1.0, -1.0, 4.0, 4.0, 4.0)  # of the loss; the scale rises to its largest value, then falls

# precision, ZeRO stage, offload, parameters up to this size stay whole on every rank in stage 3
CASES = [
    *(("fp32", 0, "none", 0), ("fp32", 1, "none", 0), ("fp32", 2, "none", 0), ("fp32", 2, "optimizer", 0)),
    *(("fp32", 3, "none", 0), ("fp32", 3, "none", 1000), ("fp32", 3, "optimizer+params", 0), ("bf16", 1, "none", 0)),
    *(("bf16", 2, "none", 0), ("bf16", 3, "none", 0), ("bf16", 3, "none", 1000)),
]


class Scaled(nn.Module):
    """A model with the parameters before and after its logit scale that make ranks own different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.full((5, 3), 4.0))
        self.logit_scale = nn.Parameter(torch.tensor(4.0))
        self.floor = nn.Parameter(torch.tensor(0.5))
        self.after = nn.Parameter(torch.full((4,), 4.0))
        self.frozen = nn.Parameter(torch.tensor(9.0), requires_grad=False)

    def forward(self, slope: Tensor) -> Tensor:
        rising = self.before.sum() + self.logit_scale + self.after.sum()
        return slope * (rising - self.floor + 0 * self.frozen)


def optimizer_of(model: Scaled) -> torch.optim.Optimizer:
    limited = [{"params": [value], LIMITS: (0.0, LARGEST)} for value in (model.logit_scale, model.floor)]
    return torch.optim.AdamW([{"params": [model.before, model.after]}, *limited], lr=0.3, weight_decay=0.0)


def clamped_by_deepspeed() -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return of each case all weights after each step: the fp32 ones, and those of the forward pass."""
    prepare_deepspeed(torch.device("cpu"))
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    results = []
    for precision, stage, offload, persistent in CASES:
        spec = run_spec({"precision": precision}, offload=offload)
        model = Scaled()
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": persistent,
                **offload_config(spec, layout_of(spec, stage), Path()),
            },
            **precision_config(spec),
        }
        optimizer = optimizer_of(model)
        keep_within_limits(optimizer)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        masters, copies = [], []
        for slope in SLOPES:
            engine.backward(engine(torch.tensor(slope, dtype=model.before.dtype)).float())
            engine.step()
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            whole = [safe_get_full_fp32_param(parameter) if stage else parameter for parameter in trained]
            masters.append(torch.cat([each.detach().float().flatten() for each in whole]))
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                copies.append(torch.cat([each.detach().float().flatten() for each in model.parameters()]))
        results.append((masters, copies))
    return results


def clamped_by_torch() -> list[Tensor]:
    model, seen = Scaled(), []
    optimizer = optimizer_of(model)
    for slope in SLOPES:
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.tensor(slope)))
        optimizer.step()
        for parameter in (model.logit_scale, model.floor):
            parameter.data.clamp_(0.0, LARGEST)
        seen.append(torch.cat([value.detach().flatten() for value in model.parameters()]))
    return seen


def test_masters_and_copies_are_clamped_as_in_plain_torch() -> None:
    expected = clamped_by_torch()
    scales, floors = ([float(seen[place]) for seen in expected] for place in (15, 16))
    assert max(scales) == torch.tensor(LARGEST).item()  # reached, and left again
    assert scales[-1] < LARGEST - 0.2
    assert min(floors) == 0.0
    assert max(float(seen[0]) for seen in expected) > LARGEST + 0.1  # other parameters are not clamped
    for reported in on_ranks(2, clamped_by_deepspeed):
        for case, (masters, copies) in zip(CASES, reported, strict=True):
            for wanted, master, copy in zip(expected, masters, copies, strict=True):
                assert torch.allclose(master, wanted[:-1], rtol=0, atol=1e-6), case
                rounded = master.to(torch.bfloat16).float() if case[0] == "bf16" else master
                assert torch.equal(copy[:-1], rounded), case
                assert float(copy[-1]) == 9.0


@pytest.mark.parametrize("largest", [4.0, None])
def test_the_logit_scale_of_clip_has_a_group_with_limits_in_every_stage(largest: float | None) -> None:
    tower = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    spec = ClipSpec.model_validate(
        {
            "family": "clip",
            "vision_config": {**tower, "image_size": 8, "patch_size": 4},
            "text_config": {**tower, "vocab_size": 16, "max_position_embeddings": 8},
            "max_logit_scale": largest,
        }
    )
    with torch.device("meta"):
        model = Clip(spec)
    settings = {name: Settings(1.0, 0.0) for name, _ in model.named_parameters()}
    stage = Stage(1, 9, (Phase(1, 9, settings),), dict.fromkeys(settings, 1))
    for groups in (parameter_groups(model, OptimizerSpec()), parameter_groups(model, OptimizerSpec(), stage)):
        limited = [group for group in groups if LIMITS in group]
        assert sum(len(group["params"]) for group in groups) == len(settings)
        if largest is None:
            assert not limited
        else:
            (group,) = limited
            assert group["params"][0] is model.logit_scale
            assert group[LIMITS] == (-math.inf, largest)
