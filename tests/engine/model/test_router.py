"""Routers choose and weigh experts as those of transformers do."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

from scaletrain_cli.engine.model.moe import MoELayer, routing_measures, update_correction_biases
from scaletrain_cli.engine.model.router import Router
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.model_consistency import model_inconsistencies

HIDDEN, EXPERTS, TOP = 16, 12, 4
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}


def spec_of(**settings: Any) -> ModelSpec:
    spec = ModelSpec(
        **{"family": "llama", "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
        **{"head_dim": HIDDEN, "intermediate_size": 8, "vocab_size": 32, "seq_len": 24, "max_position_embeddings": 24},
        **{**SIZES, "num_experts": EXPERTS, **settings},
    )
    assert list(model_inconsistencies(spec)) == []
    return spec


def with_weights_of(theirs: torch.nn.Module, **settings: Any) -> Router:
    """Return our router with random weights, which theirs gets too."""
    torch.manual_seed(0)
    for tensor in (*theirs.parameters(), *theirs.buffers()):
        torch.nn.init.normal_(tensor, 0.0, 0.3)
    ours = Router(spec_of(**settings))
    ours.load_state_dict(theirs.state_dict())
    return ours


def tokens() -> Tensor:
    return torch.randn(2, 24, HIDDEN, generator=torch.Generator().manual_seed(1))


def assert_equal(ours: Router, theirs: torch.nn.Module) -> None:
    x = tokens()
    chosen, weights, probabilities, _ = ours.choose(ours(x))
    logits, scores, indices = theirs(x.flatten(0, 1))
    empty = torch.zeros(48, EXPERTS)
    found = empty.scatter(1, chosen.flatten(0, 1), weights.flatten(0, 1))
    expected = empty.scatter(1, indices, scores)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours(x).flatten(0, 1), logits)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(2, 24))
    toward = torch.randn(48, EXPERTS, generator=torch.Generator().manual_seed(2))
    gradients = [
        torch.autograd.grad((mixed * toward).sum(), router.weight)[0]
        for mixed, router in ((found, ours), (expected, theirs))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("renormalize", [False, True])
def test_sigmoid_scores_with_a_bias_of_the_choice_are_those_of_deepseek_v3(renormalize: bool) -> None:
    config = DeepseekV3Config(**SIZES, **GROUPS, n_routed_experts=EXPERTS, norm_topk_prob=renormalize)
    settings = {**GROUPS, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": renormalize}
    ours = with_weights_of(DeepseekV3TopkRouter(config), **settings)
    theirs = DeepseekV3TopkRouter(config)
    theirs.load_state_dict(ours.state_dict())
    assert_equal(ours, theirs)
    unbiased = Router(spec_of(**settings))
    unbiased.load_state_dict({**ours.state_dict(), "e_score_correction_bias": torch.zeros(EXPERTS)})
    chosen = [router.choose(router(tokens())).chosen.sort().values for router in (ours, unbiased)]
    assert not torch.equal(*chosen)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_groups_are_limited_as_in_deepseek_v2(method: str) -> None:
    config = DeepseekV2Config(
        **SIZES, **GROUPS, num_attention_heads=4, n_routed_experts=EXPERTS, num_experts=EXPERTS, topk_method=method
    )
    theirs = DeepseekV2TopkRouter(config)
    groups = GROUPS if method != "greedy" else {"routed_scaling_factor": 2.5}
    assert_equal(with_weights_of(theirs, **groups, topk_method=method), theirs)


def test_softmax_over_the_chosen_experts_with_a_bias_is_that_of_gpt_oss() -> None:
    theirs = GptOssTopKRouter(GptOssConfig(**SIZES, num_local_experts=EXPERTS))
    assert_equal(with_weights_of(theirs, router_bias=True, norm_topk_prob=True), theirs)


def test_the_bias_of_the_choice_keeps_fp32_and_has_no_gradient() -> None:
    router = Router(spec_of(scoring_func="sigmoid", topk_method="noaux_tc"))
    values = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(3))
    router.e_score_correction_bias.copy_(values)
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16
    torch.testing.assert_close(router.e_score_correction_bias, values, rtol=0, atol=0)
    assert [name for name, _ in router.named_parameters()] == ["weight"]


def test_the_balance_loss_of_sigmoid_scores_is_that_of_deepseek_v3() -> None:
    """arXiv:2412.19437, equations 17 to 20: its load is that of the highest scores, without bias and groups."""
    layer = MoELayer(spec_of(**GROUPS, scoring_func="sigmoid", topk_method="noaux_tc", router_aux_loss_coef=0.3))
    generator = torch.Generator().manual_seed(4)
    for tensor in (*layer.parameters(), *layer.buffers()):
        torch.nn.init.normal_(tensor, 0.0, 0.5, generator=generator)
    x, losses = tokens(), []
    for sequence in x:
        scores = (sequence @ layer.gate.weight.T).sigmoid()
        picked = torch.nn.functional.one_hot(scores.topk(TOP).indices, EXPERTS).sum(1).float()
        shares = EXPERTS / (TOP * len(sequence)) * picked.sum(0)
        losses.append((shares * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum())
    expected = torch.stack(losses).mean()
    (wanted,) = torch.autograd.grad(0.3 * expected, layer.gate.weight)
    mixed = layer(x)
    (gradient,) = torch.autograd.grad(mixed, layer.gate.weight, torch.zeros_like(mixed))
    torch.testing.assert_close(gradient, wanted)
    measured = routing_measures(layer)
    torch.testing.assert_close(measured.balance_loss, expected.detach())


def test_the_bias_of_the_choice_moves_towards_even_loads_by_its_speed() -> None:
    """arXiv:2412.19437, section 2.1.2; passes without a gradient do not count, recomputed ones count once."""
    layer = MoELayer(spec_of(scoring_func="sigmoid", topk_method="noaux_tc", bias_update_speed=0.01))
    generator = torch.Generator().manual_seed(5)
    for tensor in layer.parameters():
        torch.nn.init.normal_(tensor, 0.0, 0.5, generator=generator)
    x = tokens()
    load = torch.zeros(EXPERTS)
    for part in x.split(1):
        load += torch.nn.functional.one_hot(layer.gate(part).topk(TOP).indices, EXPERTS).sum((0, 1, 2))
        checkpoint(layer, part, use_reentrant=False).sum().backward()
        with torch.no_grad():
            layer(part)
    update_correction_biases(layer)
    expected = 0.01 * torch.sign(load.mean() - load)
    torch.testing.assert_close(layer.gate.e_score_correction_bias, expected)
    assert {-1.0, 1.0} <= set(expected.sign().tolist())
    layer(x).sum().backward()
    update_correction_biases(layer, 0.0)  # a step that was not applied
    update_correction_biases(layer, 1.0)
    torch.testing.assert_close(layer.gate.e_score_correction_bias, expected)
    layer.gate.requires_grad_(False)
    layer(x.requires_grad_()).sum().backward()
    update_correction_biases(layer)
    torch.testing.assert_close(layer.gate.e_score_correction_bias, expected, msg="that of a frozen router stays")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks for it
def test_a_compiled_layer_counts_the_loads_of_each_pass_once() -> None:
    layer = MoELayer(spec_of(scoring_func="sigmoid", topk_method="noaux_tc", bias_update_speed=0.01))
    for tensor in layer.parameters():
        torch.nn.init.normal_(tensor, 0.0, 0.5, generator=torch.Generator().manual_seed(5))
    layer(tokens()).sum().backward()
    once, layer.step_load = layer.step_load, None
    compiled = torch.compile(layer, backend="aot_eager")
    for passes in (1, 2):
        checkpoint(compiled, tokens(), use_reentrant=False).sum().backward()
        torch.testing.assert_close(layer.step_load, passes * once)
