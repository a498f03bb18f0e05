"""The screen of `data show --step`: the samples of a step with their documents, and the part in the loss marked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from scaletrain_cli.text import counted, whole_text
from scaletrain_cli.ui.console import line, plain, stdout_console
from scaletrain_cli.ui.data_rows import image_line, marked


def show_samples(answer: Mapping[str, Any]) -> None:
    """Print the samples to stdout; without colors, what is in the loss stands between [[ and ]]."""
    console, layout = stdout_console(), answer["layout"]
    batch = "" if answer["batch"] == answer["step"] else f" (batch {whole_text(answer['batch'])} of the data)"
    of = "" if answer["rank"] is None else f" of rank {answer['rank']}"
    shown = len(answer["samples"])
    samples = f"{shown} of {counted(answer['samples_in_all'], 'sample')}{of}"
    line(console, Text(f"step {whole_text(answer['step'])}{batch}: {samples}", "bold"))
    line(
        console,
        Text(
            f"{counted(layout['gradient_accumulation_steps'], 'micro-batch', 'micro-batches')} of "
            f"{counted(layout['micro_batch_size'], 'sequence')} on {counted(layout['data_parallel'], 'replica')}; "
            f"sequences of {whole_text(answer['seq_len'])} tokens",
            "dim",
        ),
    )
    console.print()
    for sample in answer["samples"]:
        _show_sample(console, sample)
    mark = "green" if console.color_system is not None else "in [[ ]]"
    line(console, Text(f"Text {mark} is in the loss.", "dim"))


def _show_sample(console: Console, sample: Mapping[str, Any]) -> None:
    line(
        console,
        Text.assemble(
            (f"sample {whole_text(sample['sample'])}", "bold"),
            f"  {plain(sample['source'])}, sequence {whole_text(sample['sequence'])}; "
            f"micro-batch {whole_text(sample['micro_batch'])}, replica {sample['replica']}",
        ),
    )
    for text in sample["texts"]:
        name = "" if text["name"] == "text" else f"{text['name']}, "
        for document in text["documents"]:
            first, last = document["positions"]
            end = document["first"] + document["tokens"] - 1
            places = f"tokens {whole_text(document['first'])} to {whole_text(end)}"
            line(console, Text(f"{name}{places}, positions {whole_text(first)} to {whole_text(last)}", "dim"))
            console.print(marked(document["parts"], console), soft_wrap=True)
        if text["follows"] is not None:
            line(console, Text("the next token, of which only the loss is computed", "dim"))
            console.print(marked([text["follows"]], console), soft_wrap=True)
        if text["padding"]:
            line(console, Text(f"{name}{counted(text['padding'], 'token')} of padding", "dim"))
    for image in sample.get("images", ()):
        line(console, image_line(image))
    console.print()
