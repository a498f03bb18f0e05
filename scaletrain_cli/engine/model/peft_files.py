"""The files of a PEFT adapter: adapter_model.safetensors and adapter_config.json, written and read.

The factors of a linear layer have the same names here and there. PEFT stacks those of experts: the rows of A are in the
order of the experts, and the columns of B alternate between the experts (``target_parameters`` in its LoraConfig).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scaletrain_cli.engine.parallel.mesh import ShardSpec
from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import ModelSpec
from scaletrain_cli.spec.adapter import (
    Adapted,
    AdapterSpec,
    factor_shapes,
    peft_settings_that_differ,
    unsupported_peft_keys,
)
from scaletrain_cli.spec.weight_files import PEFT_PREFIX, peft_differences, peft_shapes, stacked_factor

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_MOST_SHOWN = 8  # differences; a wrong rank would list hundreds

# Name and whole shape of a parameter -> its values
Read = Callable[[str, tuple[int, ...]], Tensor]


def peft_tensors(adapter: AdapterSpec, modules: Sequence[Adapted], read: Read) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of adapter_model.safetensors."""
    for module in modules:
        shapes = factor_shapes(adapter, module)
        if module.kind != "experts":
            yield from ((PEFT_PREFIX + name, read(name, shape)) for name, shape in shapes.items())
            continue
        low = torch.cat([read(name, shape) for name, shape in shapes.items() if name.endswith("lora_A.weight")])
        halves = [read(name, shape) for name, shape in shapes.items() if name.endswith("lora_B.weight")]
        count = len(module.halves)
        groups = [halves[first : first + count] for first in range(0, len(halves), count)]
        experts = [torch.stack(group, 1).flatten(0, 1) if module.interleaved else torch.cat(group) for group in groups]
        yield stacked_factor(module, modules, "A"), low
        yield stacked_factor(module, modules, "B"), torch.stack(experts, dim=-1).flatten(1)


def peft_config(
    adapter: AdapterSpec,
    modules: Sequence[Adapted],
    base: str,
    revision: str | None,
    to_save: Sequence[str],
    *,
    mixture: bool = False,
) -> dict[str, Any]:
    """Return adapter_config.json. ``to_save``: modules of the base model that were trained, too.

    ``mixture``: see ``has_stacked_experts``. PEFT then takes names such as ``layers.0.mlp.up_proj`` in target_modules
    for those of the experts, which transformers stacks; as parameters it finds them, without dropout and DoRA.
    """
    alpha = int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha
    parameters = [module.name for module in modules if module.kind == "experts"]
    if mixture and not adapter.dora:
        parameters += [module.parameter for module in modules if is_mlp(module)]
    named = {module.name for module in modules if module.parameter not in parameters}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": adapter.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0 if parameters else adapter.dropout,
        "target_modules": [module.name for module in modules if module.name in named],
        "target_parameters": parameters or None,
        "bias": "none",
        "fan_in_fan_out": any(module.transposed for module in modules),
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": [*to_save] or None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def has_stacked_experts(model: ModelSpec) -> bool:
    """Return True if PEFT takes transformers' model for one with stacked experts; a DeepSeek may have none."""
    return model.num_experts > 0 or model.kv_lora_rank > 0


def is_mlp(module: Adapted) -> bool:
    """Return True for the linear layers of a dense MLP, or of shared experts."""
    return module.kind == "linear" and module.name.rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj")


class PeftFolder:
    """The factors in a PEFT folder, which must have those of all ``modules`` and of no others.

    Raises UsageError that lists the differences.
    """

    def __init__(self, folder: Path, adapter: AdapterSpec, modules: Sequence[Adapted]) -> None:
        self._folder, self._adapter, self._modules = folder, adapter, modules
        self._module_of = {name: module for module in modules for name in factor_shapes(adapter, module)}
        try:
            config = json.loads((folder / CONFIG).read_bytes())
            if not isinstance(config, dict):
                raise ValueError(f"{CONFIG} holds no JSON object")
            file: Any = safe_open(folder / WEIGHTS, framework="pt")
            self._file = file
            self._stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError) as error:
            failure = {"path": str(folder), "error": str(error) or type(error).__name__}
            raise UsageError(Reason("engine.adapter-unreadable", failure)) from error
        expected, stored = peft_shapes(adapter, modules), str(folder / WEIGHTS)
        if problems := [*self._config_mismatches(config), *peft_differences(expected, self._stored, stored)]:
            shown = tuple(problems[:_MOST_SHOWN])
            params = {"folder": str(folder), "differences": len(problems), "shown": len(shown)}
            raise UsageError(Reason("engine.adapter-differs", params), shown)

    def _config_mismatches(self, config: dict[str, Any]) -> Iterator[Problem]:
        path = str(self._folder / CONFIG)
        for ours, (key, value) in peft_settings_that_differ(config, self._adapter).items():
            hint = f"Set model.adapter.{ours}: {str(value).lower()}."
            yield Problem(path, key, f"the spec has {str(getattr(self._adapter, ours)).lower()}.", str(value), hint)
        for key, value in unsupported_peft_keys(config).items():
            hint = "Merge the adapter into its base model with PEFT, and set model.weights to the result."
            yield Problem(path, key, "is not supported.", str(value)[:80], hint)

    def read(self, name: str, whole_shape: tuple[int, ...], spec: ShardSpec | None) -> Tensor:
        """Return this rank's shard of a factor, fp32."""
        module = self._module_of[name]
        values = (
            self._of_expert(name, module) if module.kind == "experts" else self._file.get_tensor(PEFT_PREFIX + name)
        )
        return (values if spec is None else spec.take(values)).float()

    def _of_expert(self, name: str, module: Adapted) -> Tensor:
        *_, number, matrix, letter, _ = name.split(".")
        stored = self._file.get_tensor(stacked_factor(module, self._modules, letter[-1]))
        if letter == "lora_A":
            whole: Tensor = stored.chunk(module.experts)[int(number)]
            return whole
        of_expert: Tensor = stored.view(len(stored), -1, module.experts)[..., int(number)]
        if module.interleaved:
            return of_expert[module.halves.index(matrix) :: len(module.halves)]
        return of_expert.chunk(len(module.halves))[module.halves.index(matrix)]


def merged(adapter: AdapterSpec, module: Adapted, name: str, weight: Tensor, read: Read) -> Tensor:
    """Return a weight [out, in] (of a transposed layer [in, out]) with its adapter, fp32.

    ``name``: that of the weight; of stacked experts one of several. With DoRA the rows are m / |W + s B A| (W + s B A).
    """
    shapes = factor_shapes(adapter, module)

    def factor(ending: str) -> Tensor:
        name = f"{module.name}.{ending}"
        return read(name, shapes[name]).float()

    weight = weight.float()
    if module.kind == "embedding":
        return weight + adapter.scaling * (factor("lora_embedding_B") @ factor("lora_embedding_A")).t()
    if module.kind == "experts":
        expert, stack = name.removesuffix(".weight").rpartition(".")[0], module.name.rpartition(".")[2]
        low, high = f"{expert}.{stack}.lora_A.weight", f"{name.removesuffix('.weight')}.lora_B.weight"
        return weight + adapter.scaling * (read(high, shapes[high]).float() @ read(low, shapes[low]).float())
    update = adapter.scaling * (factor("lora_B.weight") @ factor("lora_A.weight"))
    whole = weight + (update.t() if module.transposed else update)
    if not adapter.dora:
        return whole
    norms = torch.linalg.vector_norm(whole, dim=0 if module.transposed else 1)
    ratio: Tensor = factor("lora_magnitude_vector") / norms
    return whole * (ratio if module.transposed else ratio.unsqueeze(1))


def module_of_weight(modules: Sequence[Adapted]) -> dict[str, Adapted]:
    """Return the adapted module of each weight by the weight's name; of a tied head ``lm_head.weight``."""
    by_weight: dict[str, Adapted] = {}
    for module in modules:
        if module.kind == "experts":
            experts = module.name.rpartition(".")[0]
            for number in range(module.experts):
                by_weight |= {f"{experts}.{number}.{half}.weight": module for half in module.halves}
        else:
            by_weight[module.parameter] = module
    return by_weight
