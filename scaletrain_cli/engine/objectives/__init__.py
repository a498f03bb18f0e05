"""Training objectives: what a batch holds, and how it becomes a loss and measures. By name in two registries."""

from scaletrain_cli.engine.objectives.base import NextToken, Objective
from scaletrain_cli.engine.objectives.dpo import DPO
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.plugins import load_reference
from scaletrain_cli.spec import LlavaSpec, RunSpec

# Names of training.objective. sft has the loss of causal_lm: which tokens count, and how much, is in its rows.
OBJECTIVES: dict[str, type[Objective]] = {"causal_lm": NextToken, "sft": NextToken, "dpo": DPO}
# Below this package; imported by runs on images, because they need other libraries.
OF_IMAGES = {
    "classification": "images:Classification",
    "regression": "images:Regression",
    "contrastive": "images:Contrastive",
}


_WITH_IMAGES = "image_text:ImageText"  # sft of a language model that reads images


def build_objective(spec: RunSpec, mesh: Mesh) -> Objective:
    name = spec.training.objective
    of_images = _WITH_IMAGES if isinstance(spec.model, LlavaSpec) else OF_IMAGES.get(name)
    kind: type[Objective] = load_reference(f"{__name__}.{of_images}") if of_images else OBJECTIVES[name]
    return kind(spec, mesh)
