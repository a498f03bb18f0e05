"""Linear layers that multiply in fp8, by torchao's emulation of the numerics."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.linear import use_fp8_linears
from scaletrain_cli.engine.parallel.mesh import Axis
from scaletrain_cli.engine.parallel.tensor import shard_over_tensor_ranks
from scaletrain_cli.errors import UsageError
from scaletrain_cli.spec import ModelSpec
from tests.engine.fresh_model import build_model
from tests.model_sizes import model_sizes

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")  # what torchao says as it is imported
both_families = pytest.mark.parametrize("family", ["llama", "gpt"])


def spec(family: str, **changed: Any) -> ModelSpec:
    heads = 2 if family == "llama" else 4
    return ModelSpec.model_validate(
        {
            **model_sizes(
                hidden=64,
                layers=2,
                heads=4,
                kv_heads=heads,
                head_dim=16,
                intermediate=96,
                vocab=512,
                seq_len=32,
                positions=32,
            ),
            "family": family,
            **changed,
        }
    )


def emulate(model: CausalLM) -> None:
    pytest.importorskip("torchao")
    use_fp8_linears(model, CPU, emulated=True)


def loss_and_gradients(model: CausalLM) -> tuple[float, dict[str, Tensor]]:
    tokens = torch.randint(512, (4, 33), generator=torch.Generator().manual_seed(0))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@both_families
def test_fp8_products_are_close_to_exact_ones_and_not_the_same(family: str) -> None:
    exact, rounded = build_model(spec(family), seed=0), build_model(spec(family), seed=0)
    before = dict(rounded.named_parameters())
    emulate(rounded)
    assert dict(rounded.named_parameters()) == before  # the same objects under the same names
    (loss, gradients), (near, nearly) = loss_and_gradients(exact), loss_and_gradients(rounded)
    assert near == pytest.approx(loss, rel=1e-3)
    assert near != loss
    for name, gradient in gradients.items():
        assert (nearly[name] - gradient).norm() < 0.15 * gradient.norm(), name


@both_families
def test_every_layer_of_a_block_multiplies_in_fp8(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    from torchao.float8 import float8_linear

    model, shapes = build_model(spec(family), seed=0), []
    product = float8_linear.matmul_with_hp_or_float8_args.apply

    def note(x: Tensor, weight: Tensor, *settings: Any) -> Tensor:
        shapes.append(tuple(weight.shape))
        return product(x, weight, *settings)  # type: ignore[no-any-return]

    monkeypatch.setattr(float8_linear.matmul_with_hp_or_float8_args, "apply", note)
    emulate(model)
    loss_and_gradients(model)
    matrices = [p.shape for block in model.blocks.values() for p in block.parameters() if p.ndim == 2]
    assert sorted(map(sorted, shapes)) == sorted(map(sorted, matrices))


@both_families
def test_tensor_parallel_layers_multiply_in_fp8_too(family: str) -> None:
    model = outline(spec(family))
    shard_over_tensor_ranks(model, Axis(size=2))
    before = {path: layer.product for path, layer in model.named_modules() if hasattr(layer, "product")}
    emulate(model)
    assert before
    assert all(model.get_submodule(path).product is not product for path, product in before.items())


def test_a_matrix_with_a_side_that_is_no_multiple_of_16_is_not_converted_to_fp8() -> None:
    model = build_model(spec("llama", intermediate_size=90), seed=0)
    emulate(model)
    kinds = {path.split(".")[-1]: type(layer).__name__ for path, layer in model.blocks.named_modules()}
    assert (kinds["q_proj"], kinds["gate_proj"]) == ("Float8Linear", "Linear")


def test_fp8_on_a_cpu_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"needs an NVIDIA GPU.*Use bf16"):
        use_fp8_linears(build_model(spec("llama"), seed=0), CPU)


def test_fp8_on_an_older_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(UsageError, match=r"needs compute capability 8\.9, and A100 has 8\.0"):
        use_fp8_linears(build_model(spec("llama"), seed=0), torch.device("cuda"))


def test_a_missing_torchao_is_reported_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(UsageError, match=r"needs torchao.*pip install.*\[fp8\]"):
        use_fp8_linears(build_model(spec("llama"), seed=0), CPU, emulated=True)
