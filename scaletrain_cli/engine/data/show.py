"""The command ``show``: the first rows of a spec as a model is trained on them, with the weight of each part."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from scaletrain_cli.data.images.prepared import is_of_images
from scaletrain_cli.data.sources.rows import Tally
from scaletrain_cli.engine.data.chat_tokenizer import Encoded, ImageTokens
from scaletrain_cli.engine.data.row_dataset import rows_folder
from scaletrain_cli.engine.data.row_source import Row, RowImage, rows_of
from scaletrain_cli.engine.data.row_writing import RowEncoder, chat_tokenizer, pack, tokenizer_of
from scaletrain_cli.engine.data.stats import datasets_of
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan import make_plan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import read_record
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec import LlavaSpec, RunSpec

_ROWS_COUNTED = 1000  # also the rows from which a tokenizer is trained, if the data are not prepared


def run_command(arguments: Sequence[str]) -> dict[str, Any]:
    """Return rows and counts, given SPEC_JSON RUNS_ROOT FIRST COUNT SOURCE, or RUN SPLIT PNG; rows count from 1.

    SOURCE: the name of the source of the rows; empty for the first one. The last three are for images: the folder of a
    run, the split, and the file to write; they may be empty. Raises UsageError.
    """
    spec = RunSpec.model_validate_json(Path(arguments[0]).read_text(encoding="utf-8"))
    if is_of_images(spec):
        return _images(spec, *arguments[1:])
    first, count, source = int(arguments[2]), int(arguments[3]), arguments[4]
    alone = spec.of_sources()
    spec = alone[source or next(iter(alone))]
    data, objective, seq_len = spec.data, spec.training.objective, spec.language_model.seq_len
    if (expand_home(data.only_source) / "dataset.json").is_file():
        raise UsageError(Reason("data.prepared-not-shown", {"source": data.source}))
    tokenizer, is_own = _tokenizer(spec, Path(arguments[1]))
    chat, with_images = chat_tokenizer(spec, tokenizer), isinstance(spec.model, LlavaSpec)
    tally = Tally()
    row_format, rows = rows_of(data, objective, tally, images=with_images)
    encoder, shown = RowEncoder(chat, data, seq_len, tally), []
    lengths: list[int] = []
    number = 0
    for number, row in enumerate(islice(rows, max(_ROWS_COUNTED, first + count - 1)), start=1):
        before = replace(encoder.counts)
        kept = [documents for _, documents in encoder.encode([row])]
        lengths += [len(document.ids) for documents in kept for document in documents]
        if first <= number < first + count:
            states = ("without_target", "too_long", "truncated")
            grown = [name for name in states if getattr(encoder.counts, name) > getattr(before, name)]
            state = (grown or ["whole" if kept else "unusable"])[0]
            whole = kept if kept else chat.encode([(row.example, row.weight)])  # also of a row that is left out
            documents = whole[0] if isinstance(whole[0], list) else []
            shown.append(_shown(number, row, state, documents, tokenizer, chat.images))
    if not shown:
        raise UsageError(Reason("data.row-out-of-range", {"rows": number, "row": first}))
    counts = encoder.counts
    sequences = (
        len(lengths) if data.packing == "none" else len(pack(lengths, seq_len, split=data.packing != "best_fit"))
    )
    return {
        "format": row_format,
        "packing": data.packing,
        "seq_len": seq_len,
        "tokenizer_trained_on_rows": None if is_own else _ROWS_COUNTED,
        "rows": shown,
        "counted": {
            "rows": counts.read + encoder.tally.unusable,
            "truncated": counts.truncated,
            "without_target": counts.without_target,
            "too_long": counts.too_long,
            "unusable": encoder.tally.unusable,
            "lost": dict(encoder.lost),
            "tokens": counts.tokens,
            "target_tokens": counts.targets,
            "sequences": sequences,
            "filled": counts.tokens / (sequences * seq_len) if sequences else 0.0,
        },
    }


def _images(
    spec: RunSpec, root: str, first: str, count: str, folder: str = "", split: str = "train", png: str = ""
) -> dict[str, Any]:
    from scaletrain_cli.engine.data.images.show import ShownImages, write_sheet  # which need torch and Pillow
    from scaletrain_cli.engine.data.step_view import opened_data

    run = RunDir(Path(folder)) if folder else None
    layout = make_plan(spec).layout if run is None else read_record(run).plan.layout
    data = opened_data(spec, layout, run, datasets_of(spec, Path(root), run))
    samples = getattr(data, split)
    pictures = list(ShownImages(spec, layout, data).of_split(split, int(first), int(count)))
    if png:
        write_sheet([picture for _, picture in pictures], Path(png))
    return {
        "split": split,
        "images": {name: len(source) for name, source in samples.items()},
        "samples": [about for about, _ in pictures],
        "png": png or None,
    }


def _tokenizer(spec: RunSpec, runs_root: Path) -> tuple[Any, bool]:
    """Return the tokenizer, and True if the run has the same one: not if it was trained on the first rows only."""
    with_images = isinstance(spec.model, LlavaSpec)
    if spec.data.tokenizer.path is None:
        prepared = rows_folder(spec, runs_root) / "tokenizer.json"
        if not prepared.is_file():
            return tokenizer_of(spec.data, spec.training.objective, _ROWS_COUNTED, images=with_images), False
        section = type(spec.data.tokenizer)(kind="file", path=str(prepared))
        spec = spec.with_changes("data", tokenizer=section)
    return tokenizer_of(spec.data, spec.training.objective), True


def _shown(
    number: int, row: Row, state: str, documents: list[Encoded], tokenizer: Any, images: ImageTokens | None
) -> dict[str, Any]:
    names = ("chosen", "rejected") if len(documents) == 2 else ("text",)
    lengths = [len(document.ids) for document in documents]
    if images is not None:  # one token for each image, instead of hundreds
        documents = [images.without_copies(document) for document in documents]
    of_images = {} if images is None else {"images": [_image(image) for image in row.images]}
    return {
        "row": number,
        "where": row.where,
        "state": state,
        "documents": [
            {
                "name": name,
                "tokens": length,
                "target_tokens": int((document.weights > 0).sum()),
                "parts": [
                    {
                        "text": tokenizer.decode([token for token, _ in part], skip_special_tokens=False),
                        "weight": weight,
                    }
                    for weight, part in (
                        (weight, list(part))
                        for weight, part in groupby(
                            zip(document.ids.tolist(), document.weights.tolist(), strict=True), key=lambda pair: pair[1]
                        )
                    )
                ],
            }
            for name, document, length in zip(names, documents, lengths, strict=True)
        ],
        **of_images,
    }


def _image(image: RowImage) -> dict[str, Any]:
    """Return the place of an image with its width and height, or with what is wrong with it."""
    from scaletrain_cli.data.images.decode import BadImageError, size_of  # these need Pillow
    from scaletrain_cli.engine.data.images.reading import read_image

    try:
        width, height = size_of(read_image(image, 3, decodes=False).content, image.place)
    except BadImageError as error:
        return {"place": image.place, "problem": error.evidence["problem"]}
    return {"place": image.place, "width": width, "height": height}
