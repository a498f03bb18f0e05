"""The command ``stats``: the report of the prepared data of a spec or of a run. Needs no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scaletrain_cli.data.images.prepared import is_of_images
from scaletrain_cli.data.images.report import image_report
from scaletrain_cli.data.mixture import Mixture, Stage
from scaletrain_cli.data.report import read_report
from scaletrain_cli.data.stages import stages_of_run
from scaletrain_cli.engine.data.row_dataset import find_datasets
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.data_size import prepared_size
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.shared_datasets import datasets_file, read_entries, recorded_folders
from scaletrain_cli.spec import ClipSpec, RunSpec
from scaletrain_cli.spec.evaluation import ZERO_SHOT

_CAPTIONS = 1024  # that are tokenized together


def run_command(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the report, given SPEC_JSON RUNS_ROOT and the folder of the run, which is empty for a spec.

    Given DATASET alone, that of a prepared dataset.
    """
    if len(arguments) == 1:
        return image_report({Path(arguments[0]).name: Path(arguments[0])})
    spec = RunSpec.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    run = RunDir(Path(arguments[2])) if arguments[2] else None
    datasets = datasets_of(spec, Path(arguments[1]), run)
    mixture = _mixture(spec, datasets, run)
    return _of_images(spec, datasets, mixture) if is_of_images(spec) else read_report(datasets, mixture)


def _of_images(spec: RunSpec, datasets: Mapping[str, Path], mixture: Mapping[str, Any]) -> dict[str, Any]:
    model: Any = spec.model
    if not isinstance(model, ClipSpec):
        return image_report(datasets, mixture, image_size=model.image_size)
    from scaletrain_cli.data.tokenizers.files import load_tokenizer

    assert spec.data.tokenizer.path is not None, "checked by the spec"
    tokenizer = load_tokenizer(spec.data.tokenizer.path, spec.data.tokenizer.tokenizer_class)

    def count_tokens(captions: Sequence[str]) -> list[int]:
        lengths = []
        for first in range(0, len(captions), _CAPTIONS):
            encoded = tokenizer.encode_batch(captions[first : first + _CAPTIONS], add_special_tokens=False)
            lengths += [len(encoding.ids) + 2 for encoding in encoded]  # with start and end
        return lengths

    return image_report(
        datasets,
        mixture,
        image_size=model.vision_config.image_size,
        count_tokens=count_tokens,
        positions=model.text_config.max_position_embeddings,
    )


def datasets_of(spec: RunSpec, runs_root: Path, run: RunDir | None = None) -> dict[str, Path]:
    """Return the folder of the prepared data of each source of training, by its name.

    ``run``: which has recorded its datasets. Raises UsageError if one is missing.
    """
    known = {} if run is None else recorded_folders(spec, runs_root, read_entries(datasets_file(run)))[0]
    if (folders := find_datasets(spec, runs_root, known)) is None:
        raise UsageError(Reason("data.not-prepared", {"root": str(runs_root)}))
    return {name: folder for name, folder in folders.items() if name != ZERO_SHOT}


def _mixture(spec: RunSpec, datasets: Mapping[str, Path], run: RunDir | None) -> dict[str, Any]:
    """Return how many training sequences of a run come from each source, in its stages and in all."""
    objective, length = spec.training.objective, spec.units_per_sample
    documents = {name: read_document(folder / "dataset.json") or {} for name, folder in datasets.items()}
    sizes = {name: prepared_size(document, objective, length).train for name, document in documents.items()}
    batch, total = spec.training.global_batch_size, spec.total_steps
    stages = stages_of_run(spec.data, sizes, total, batch, [] if run is None else read_events(run))
    order = [Stage(stage.first, tuple(stage.shares.get(name, 0.0) for name in sizes)) for stage in stages]
    counts = Mixture(order).counts(total * batch).tolist()
    ends = [*(stage.first for stage in stages[1:]), total * batch]
    return {
        "samples": total * batch,
        "stages": [
            {"first_step": stage.first // batch + 1, "last_step": end // batch, "shares": list(weights.weights)}
            for stage, weights, end in zip(stages, order, ends, strict=True)
        ],
        "sources": [
            {
                "source": name,
                "sequences": sizes[name],
                "samples": count,
                "share": count / (total * batch),
                "epochs": count / sizes[name] if sizes[name] else None,
            }
            for name, count in zip(sizes, counts, strict=True)
        ],
    }
