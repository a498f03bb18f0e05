"""Adapters are written as PEFT writes them, read as PEFT reads them, and merged as PEFT merges them."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.materialization import named_matrices
from scaletrain_cli.engine.model.peft_files import (
    CONFIG,
    WEIGHTS,
    PeftFolder,
    Read,
    has_stacked_experts,
    merged,
    module_of_weight,
    peft_config,
    peft_tensors,
)
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.resource_checks.weights import adapter_config_problems
from scaletrain_cli.plan.parameters import modules_with_adapter
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.adapter import Adapted, AdapterSpec, is_adapter_parameter, unsupported_peft_keys
from tests.engine.model.adapted_models import (
    GPT,
    GPT_OSS,
    LLAMA,
    MIXTRAL,
    TIED,
    lora,
    matrices,
    ours,
    save_hugging_face,
)
from tests.engine.model.test_adapters import ENDS

MODELS = [
    pytest.param(LLAMA, lora(), id="llama"),
    pytest.param(LLAMA, lora(rslora=True, dora=True, alpha=12.0), id="rslora-dora"),
    pytest.param(TIED, lora(targets=ENDS), id="tied-embedding-and-head"),
    pytest.param(GPT, lora(dora=True, targets=["c_attn", "mlp.*"]), id="gpt"),
    pytest.param(GPT, lora(targets=["c_attn", "wpe"]), id="gpt-positions"),
    pytest.param(MIXTRAL, lora(targets=["all-linear", "experts.*"]), id="experts"),
    pytest.param(MIXTRAL, lora(targets=["experts.down_proj"]), id="experts-down"),
    pytest.param(GPT_OSS, lora(targets=["all-linear", "experts.*"]), id="gpt-oss"),
]


def modules_of(spec: ModelSpec, adapter: AdapterSpec) -> list[Adapted]:
    return modules_with_adapter(spec.model_copy(update={"adapter": adapter}))


def reader(model: CausalLM) -> Read:
    values = {
        matrix.name: parameter.detach().flatten()[matrix.start : matrix.stop].view(matrix.whole_shape)
        for _, _, parameter, found in matrices(model)
        for matrix in found
    }

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        assert values[name].shape == shape
        return values[name]

    return read


def trained(spec: ModelSpec, adapter: AdapterSpec, folder: Path) -> CausalLM:
    """A model whose factors all have values that change its output."""
    model = ours(spec, adapter, folder)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def write(spec: ModelSpec, adapter: AdapterSpec, model: CausalLM, folder: Path, base: Path) -> None:
    modules = modules_of(spec, adapter)
    folder.mkdir()
    tensors = {name: values.contiguous() for name, values in peft_tensors(adapter, modules, reader(model))}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(
        json.dumps(peft_config(adapter, modules, str(base), None, (), mixture=has_stacked_experts(spec)))
    )


@pytest.mark.parametrize(("spec", "adapter"), MODELS)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # PEFT: tied heads, a renamed property
def test_peft_loads_what_is_written_and_merges_the_same_and_we_read_it_again(
    spec: ModelSpec, adapter: AdapterSpec, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    save_hugging_face(spec, tmp_path / "base")
    model = trained(spec, adapter, tmp_path / "base")
    write(spec, adapter, model, tmp_path / "adapter", tmp_path / "base")
    again = PeftFolder(tmp_path / "adapter", adapter, modules_of(spec, adapter))
    factors = [(name, shape) for name, shape in named_matrices(model) if is_adapter_parameter(name)]
    assert factors
    assert all(torch.equal(again.read(*factor, None), reader(model)(*factor)) for factor in factors)
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs: Any = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    tokens = torch.arange(32).view(2, 16)
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)

    with torch.no_grad():
        expected = theirs(input_ids=tokens, labels=tokens).loss.item()
        assert model(tokens, labels).item() == pytest.approx(expected, rel=1e-6)

        # Merged, each weight has its update; a tied head and its table become different weights.
        read, modules = reader(model), module_of_weight(modules_of(spec, adapter))
        shapes = dict(named_matrices(outline(spec)))
        whole = {name: read(name, shape) for name, shape in shapes.items()}
        if "lm_head.weight" in modules and spec.tie_word_embeddings:
            whole["lm_head.weight"] = whole["model.embed_tokens.weight"]
        untied = "lm_head.weight" in whole
        for name in whole.keys() & modules.keys():
            whole[name] = merged(adapter, modules[name], name, whole[name], read)
        plain = outline(spec.model_copy(update={"tie_word_embeddings": not untied}))
        for module, name, parameter, found in matrices(plain):
            if not untied and found[0].name == "lm_head.weight":
                continue
            values = torch.cat([whole[matrix.name].flatten() for matrix in found]).view(parameter.shape)
            setattr(module, name, torch.nn.Parameter(values))
        if not untied:
            plain.tie()
        assert plain(tokens, labels).item() == pytest.approx(expected, rel=2e-6)


def test_a_folder_with_another_adapter_is_refused_with_the_differences(tmp_path: Path) -> None:
    save_hugging_face(LLAMA, tmp_path / "base")
    adapter = lora(targets=["q_proj"])
    write(LLAMA, adapter, trained(LLAMA, adapter, tmp_path / "base"), tmp_path / "adapter", tmp_path / "base")
    other = lora(targets=["q_proj", "v_proj"], rank=16)

    with pytest.raises(UsageError) as refused:
        PeftFolder(tmp_path / "adapter", other, modules_of(LLAMA, other))

    shown = [(problem.key, problem.hint) for problem in refused.value.problems]
    assert ("r", "Set model.adapter.rank: 8.") in shown
    assert ("base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight", None) in shown


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        PeftFolder(tmp_path, lora(), modules_of(LLAMA, lora()))


def test_a_configuration_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(UsageError, match=r"cannot be read: adapter_config.json holds no JSON object"):
        PeftFolder(tmp_path, lora(), modules_of(LLAMA, lora()))


def test_peft_itself_writes_the_same_names(tmp_path: Path) -> None:
    from tests.engine.model.adapted_models import with_peft

    adapter = lora(targets=["all-linear", "experts.*"])
    targets = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    targets["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    with_peft(save_hugging_face(MIXTRAL, tmp_path / "base"), adapter, **targets).save_pretrained(tmp_path / "theirs")
    with torch.device("meta"):
        ours_ = dict(peft_tensors(adapter, modules_of(MIXTRAL, adapter), lambda _, shape: torch.empty(shape)))

    theirs = load_file(tmp_path / "theirs" / WEIGHTS)
    assert {name: values.shape for name, values in ours_.items()} == {n: v.shape for n, v in theirs.items()}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_an_adapter_that_cannot_be_read_is_merged_by_the_command_of_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    save_hugging_face(LLAMA, tmp_path / "base")
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    settings: dict[str, Any] = {"r": 8, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
    settings |= {"rank_pattern": {"up_proj": 4}, "alpha_pattern": {"up_proj": 3}, "modules_to_save": ["lm_head"]}
    theirs = get_peft_model(theirs, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    with torch.no_grad():
        theirs.base_model.model.lm_head.weight.mul_(1.5)
    theirs.save_pretrained(tmp_path / "adapter")
    (reason,) = adapter_config_problems(tmp_path / "adapter", lora(rank=8))
    assert {"rank_pattern", "alpha_pattern", "modules_to_save"} <= {
        key.partition(" ")[0] for key in reason.params["keys"]
    }

    _, program, *arguments = shlex.split(reason.remedies[1].removeprefix("python "))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["-c", *arguments])
    exec(program)

    HuggingFaceFolder(tmp_path / "merged", outline(LLAMA))  # has all tensors of the model, and no others
    merged_model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        assert torch.allclose(merged_model(tokens).logits, theirs(tokens).logits, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("init_lora_weights", "pissa"),
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("lora_bias", True),
        ("modules_to_save", ["x"]),
    ],
)
def test_an_adapter_of_another_form_is_refused_by_name(key: str, value: object, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"r": 8, "bias": "none", "rank_pattern": {}, key: value}))
    (reason,) = adapter_config_problems(tmp_path, lora(rank=16), "org/adapter")
    assert f"{key} = {value}" in str(reason)
    assert reason.remedies[1].endswith(" org/adapter merged")


def test_the_settings_that_peft_writes_for_plain_adapters_are_supported() -> None:
    from peft import LoraConfig

    for settings in ({}, {"use_rslora": True}, {"init_lora_weights": "gaussian"}, {"lora_dropout": 0.1}):
        assert unsupported_peft_keys(LoraConfig(r=8, **settings).to_dict() | {"peft_type": "LORA"}) == {}
