"""The parameters of a model that train at each step, with their settings: ``training.trainable``, resolved by name."""

import difflib
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.axes import Rule
from scaletrain_cli.plan.identity_cache import cached_by_identity
from scaletrain_cli.plan.parameter import Parameter
from scaletrain_cli.plan.parameters import has_adapter, model_parameters
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.adapter import is_adapter_parameter
from scaletrain_cli.spec.extensions import BUILT_IN_FAMILIES
from scaletrain_cli.spec.run import FAMILIES, AnyModel
from scaletrain_cli.spec.training import OptimizerSpec, TrainableGroup

_MOST_NEAR = 3  # names that an error suggests
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")


class Settings(NamedTuple):
    """The factor of the scheduled learning rate, and the weight decay, of one parameter at one step.

    ``orthogonalized``: Muon updates it.
    """

    lr_factor: float
    weight_decay: float
    orthogonalized: bool = False


class Phase(NamedTuple):
    """Steps ``first_step`` to ``last_step``, which train the same parameters with the same settings, by name."""

    first_step: int
    last_step: int
    settings: Mapping[str, Settings]


class Stage(NamedTuple):
    """Phases one after another that train the same parameters. Between stages the engine is built again.

    ``since``: for each parameter the first step of the stages that train it without interruption, so that parameters
    with the same number have taken the same number of steps.
    """

    first_step: int
    last_step: int
    phases: tuple[Phase, ...]
    since: Mapping[str, int]


class _Recipe(NamedTuple):
    """The settings that decide what trains; hashable, as a cache key."""

    model: AnyModel
    trainable: tuple[TrainableGroup, ...]
    optimizer: OptimizerSpec
    steps: int


@cached_by_identity
def training_stages(spec: RunSpec) -> tuple[Stage, ...]:
    """Return the stages of a run, in order, from step 1 to the last one.

    Raises UsageError with all problems of ``training.trainable``.
    """
    check_what_trains(spec)
    return _stages(_recipe(spec))


def stages_of_run(spec: RunSpec) -> tuple[Stage | None, ...]:
    """Return the stages of a run in order; (None,) if everything trains in all steps with one learning rate."""
    return (None,) if trains_everything(spec) else training_stages(spec)


def steps_of(spec: RunSpec, stage: Stage | None) -> int:
    """Return the number of steps of a stage; None: those of the run."""
    return spec.total_steps if stage is None else stage.last_step - stage.first_step + 1


def count_trained(spec: RunSpec, stage: Stage | None) -> int:
    """Return the number of parameters that train in a stage."""
    every = model_parameters(spec.model)
    return sum(tensor.numel for tensor in every if (tensor.trains if stage is None else tensor.name in stage.since))


def stored_parameters(spec: RunSpec) -> list[tuple[int, int]]:
    """Return, for each stage, the parameters in a checkpoint: (those that train, frozen ones).

    Weights that never train are not stored if they come from the files of ``model.weights``.
    """
    left_out = base_names(spec)
    stored = sum(tensor.numel for tensor in model_parameters(spec.model) if tensor.name not in left_out)
    return [(count, stored - count) for count in (count_trained(spec, stage) for stage in stages_of_run(spec))]


def stage_at(spec: RunSpec, step: int) -> Stage:
    """Return the stage that trains a step (1-based), or the state after it. Step 0 is in the first stage."""
    return next(stage for stage in training_stages(spec) if step <= stage.last_step)


def trained_at(spec: RunSpec, step: int) -> Stage | None:
    """Return the stage that trains a step (1-based), or that trained last after it; None if all parameters train."""
    return None if trains_everything(spec) else stage_at(spec, step)


def trained_ever(spec: RunSpec) -> frozenset[str]:
    """Return the names of the parameters that train at some step of the run."""
    return frozenset(name for stage in training_stages(spec) for name in stage.since)


@cached_by_identity
def trains_only_adapters(spec: RunSpec) -> bool:
    """Return True if no parameter of the model itself trains at any step of the run."""
    return all(map(is_adapter_parameter, trained_ever(spec)))


def base_names(spec: RunSpec) -> frozenset[str]:
    """Return the parameters that keep the values of ``model.weights`` in the whole run; no checkpoint stores them."""
    if spec.weights is None or trains_everything(spec):
        return frozenset()
    return frozenset(parameter.name for parameter in model_parameters(spec.model)) - trained_ever(spec)


def trains_everything(spec: RunSpec) -> bool:
    """Return True if all parameters train in all steps with the same optimizer and rate, whatever their names are."""
    return not names_what_trains(spec) and not has_muon(spec)


def names_what_trains(spec: RunSpec) -> bool:
    """Return True if parameters are frozen at some step, or have learning rates of their own."""
    training = spec.training
    return bool(training.trainable) or training.optimizer.layer_decay != 1 or has_adapter(spec.model)


def has_muon(spec: RunSpec) -> bool:
    """Return True if Muon updates some parameters and AdamW the others, for a model that Muon can train."""
    return spec.training.optimizer.name == "muon" and spec.model.family in BUILT_IN_FAMILIES


def _recipe(spec: RunSpec) -> _Recipe:
    return _Recipe(spec.model, spec.training.trainable, spec.training.optimizer, spec.total_steps)


@lru_cache(maxsize=16)
def _stages(recipe: _Recipe) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    for phase in _phases(recipe):
        last = stages[-1] if stages else None
        if last is not None and last.since.keys() == phase.settings.keys():
            stages[-1] = last._replace(last_step=phase.last_step, phases=(*last.phases, phase))
        else:
            before = {} if last is None else last.since
            since = {name: before.get(name, phase.first_step) for name in phase.settings}
            stages.append(Stage(phase.first_step, phase.last_step, (phase,), since))
    return tuple(stages)


def _phases(recipe: _Recipe) -> tuple[Phase, ...]:
    phases: list[Phase] = []
    for first, last in _spans(recipe):
        settings = _settings(recipe, first)
        if phases and phases[-1].settings == settings:
            phases[-1] = phases[-1]._replace(last_step=last)
        else:
            phases.append(Phase(first, last, settings))
    return tuple(phases)


def _spans(recipe: _Recipe) -> Iterator[tuple[int, int]]:
    """Return the first and last steps between which no group starts or ends, in order."""
    ends = {group.end_step + 1 for group in recipe.trainable if group.end_step is not None}
    steps = {1} | {group.start_step for group in recipe.trainable} | ends
    starts = sorted(step for step in steps if step <= recipe.steps)
    return zip(starts, [*(start - 1 for start in starts[1:]), recipe.steps], strict=True)


def _settings(recipe: _Recipe, step: int) -> dict[str, Settings]:
    """Return the settings of the parameters that train at a step, in the order of the model."""
    settings: dict[str, Settings] = {}
    everything = not recipe.trainable and not has_adapter(recipe.model)
    deciding = _deciding(recipe, step)
    for parameter in model_parameters(recipe.model):
        if (number := deciding.get(parameter.name)) is not None:
            settings[parameter.name] = _settings_of(recipe, recipe.trainable[number], parameter)
        elif (everything or parameter.adapter) and parameter.trains:
            settings[parameter.name] = _settings_of(recipe, None, parameter)
    return settings


@lru_cache(maxsize=64)
def _deciding(recipe: _Recipe, step: int) -> dict[str, int]:
    """Return the number of the first group that matches each parameter at a step; others are left out."""
    active = {
        number: group.match
        for number, group in enumerate(recipe.trainable)
        if group.start_step <= step and (group.end_step is None or step <= group.end_step)
    }
    numbers: dict[str, int] = {}
    for parameter in model_parameters(recipe.model) if active else ():
        for number, patterns in active.items() if parameter.trains else ():
            if any(fnmatchcase(parameter.name, pattern) for pattern in patterns):
                numbers[parameter.name] = number
                break
    return numbers


def _settings_of(recipe: _Recipe, group: TrainableGroup | None, parameter: Parameter) -> Settings:
    """Return the settings of a parameter. Norms and biases have no weight decay (GPT-3, arXiv:2005.14165, appendix B).

    ``layer_decay`` multiplies the learning rate once per layer below the head: the last block is one layer below it,
    and the embeddings are below the first block (BEiT, arXiv:2106.08254).
    """
    optimizer, below = recipe.optimizer, parameter.below
    if below is None:
        assert isinstance(recipe.model, ModelSpec)
        layers = recipe.model.num_hidden_layers
        below = {"embedding": layers + 1, "block": layers - (parameter.block or 0), "closing": 0}[parameter.place]
    lr, decay = optimizer.lr, optimizer.weight_decay
    if group is not None:
        lr = optimizer.lr if group.lr is None else group.lr
        decay = decay if group.weight_decay is None else group.weight_decay
    if not decays(parameter, optimizer):
        decay = 0.0
    factor = lr / optimizer.lr * optimizer.layer_decay**below
    if optimizer.name != "muon" or recipe.model.family not in BUILT_IN_FAMILIES:
        return Settings(factor, decay)
    if not parameter.is_orthogonalized and optimizer.muon.adamw_lr is not None:
        factor *= optimizer.muon.adamw_lr / optimizer.lr
    return Settings(factor, decay, parameter.is_orthogonalized)


def decays(parameter: Parameter, optimizer: OptimizerSpec) -> bool:
    """Return True if weight decay applies to a parameter: a matrix, without those that are left out."""
    tables = parameter.place == "embedding" and not optimizer.decay_embeddings
    return parameter.is_matrix and parameter.decays and not tables


# Problems that only the names show.


def check_what_trains(spec: RunSpec) -> None:
    """Raise UsageError with all problems if ``training.trainable`` or ``layer_decay`` does not fit the model."""
    if trains_everything(spec):
        return
    if spec.model.family not in FAMILIES:
        key = "training.trainable" if spec.training.trainable else "training.optimizer.layer_decay"
        rules: tuple[Rule, ...] = (Rule(key, None, "trainable-built-in-families", {"family": spec.model.family}),)
    else:
        rules = _problems(_recipe(spec))
    if rules:
        count = {"problems": len(rules)}
        raise UsageError(Reason("plan.trainable-invalid", count), tuple(r.problem(spec.where(r.key)) for r in rules))


@lru_cache(maxsize=16)
def _problems(recipe: _Recipe) -> tuple[Rule, ...]:
    rules = [rule for number, group in enumerate(recipe.trainable) for rule in _about_group(recipe, number, group)]
    return tuple(rules or _about_stages(recipe))


def _about_group(recipe: _Recipe, number: int, group: TrainableGroup) -> Iterator[Rule]:
    """Yield the patterns that match nothing, and a weight decay without a matrix that it applies to."""
    parameters, key = model_parameters(recipe.model), f"training.trainable.{number}"
    for pattern in group.match:
        if not any(fnmatchcase(parameter.name, pattern) for parameter in parameters):
            near = near_patterns(pattern, recipe.model)
            if near:
                yield Rule(f"{key}.match", pattern, "trainable-matches-nothing", fix={"near": near})
            else:
                yield Rule(f"{key}.match", pattern, "trainable-no-such-name", fix={"example": parameters[-1].name})
            return
    matched = [p for p in parameters if any(fnmatchcase(p.name, pattern) for pattern in group.match)]
    if group.weight_decay and not any(_settings_of(recipe, group, parameter).weight_decay for parameter in matched):
        yield Rule(f"{key}.weight_decay", group.weight_decay, "trainable-decays-nothing")


def _about_stages(recipe: _Recipe) -> Iterator[Rule]:
    """Yield steps at which nothing trains, groups that never decide, and experts that are not trained alike."""
    key, deciding = "training.trainable", set()
    tensors = {parameter.name: parameter.tensor for parameter in model_parameters(recipe.model)}
    for first, last in _spans(recipe):
        settings = _settings(recipe, first)
        deciding |= set(_deciding(recipe, first).values())
        if not settings:
            yield Rule(key, None, "trains-nothing", {"first": first, "last": last})
        of_tensor: dict[str, Settings | None] = {}
        for name, tensor in tensors.items():
            if of_tensor.setdefault(tensor, settings.get(name)) != settings.get(name):
                yield Rule(key, None, "trainable-splits-experts", {"step": first, "tensor": tensor, "name": name})
                return
    for number in sorted(set(range(len(recipe.trainable))) - deciding):
        yield Rule(f"{key}.{number}.match", ", ".join(recipe.trainable[number].match), "trainable-never-first")


def near_patterns(pattern: str, model: AnyModel) -> list[str]:
    """Return patterns near ``pattern`` that match parameters of the model; empty if none is near."""
    names = dict.fromkeys(_NUMBERS.sub("*", parameter.name) for parameter in model_parameters(model))
    for wider in (f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*"):
        if any(fnmatchcase(parameter.name, wider) for parameter in model_parameters(model)):
            return [wider]
    return difflib.get_close_matches(_NUMBERS.sub("*", pattern), names, n=_MOST_NEAR, cutoff=0.5)
