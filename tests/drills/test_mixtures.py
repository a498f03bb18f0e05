"""A run on a mixture trains on the same samples whatever happens to it: what its ranks read, against a plain count."""

import json
import os
import random
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from scaletrain_cli.data.prepared import find_prepared
from scaletrain_cli.engine.faults import VARIABLE
from scaletrain_cli.launch.preparation import prepare_data
from scaletrain_cli.rundir.journal import read_metrics
from scaletrain_cli.rundir.record import read_record
from tests.cli.command_line import scaletrain
from tests.data.test_mixture import webster
from tests.drills.training_runs import STEPS, Drill, drill_spec, slowed, submit_drill

pytestmark = [pytest.mark.drill, pytest.mark.long]
BATCH, LENGTH, SEED = 12, 32, 42
DOCUMENTS = {"web": 60, "code": 8, "books": 12}

# Writes the samples that a rank trains on, and their tokens, where the engine runs its steps.
_RECORDER = """
import importlib.abc, importlib.util, json, os, sys

class Recorder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "scaletrain_cli.engine.step":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            train = module.ModelStepper.train
            def recorded(stepper, batches, **given):
                with open(os.path.join(os.environ["SAMPLES_READ"], f"{os.getpid()}.jsonl"), "a") as file:
                    for batch in batches:
                        rows = {"samples": batch.samples.tolist(), "tokens": batch.tokens.tolist()}
                        rows["world"] = int(os.environ["WORLD_SIZE"])
                        file.write(json.dumps(rows) + "\\n")
                return train(stepper, batches, **given)
            module.ModelStepper.train = recorded
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Recorder())
"""


def mix64(value: int) -> int:
    """Return SplitMix64 of a value, as its authors' C code computes it."""
    mask = 2**64 - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return value ^ value >> 31


def shuffled(size: int, seed: int, epoch: int) -> list[int]:
    """Return the order of an epoch: a Feistel network of four rounds, applied until the number is in range."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    key, low = mix64(mix64(seed) ^ epoch), 2**half - 1
    order = []
    for number in range(size):
        while True:
            left, right = number >> half, number & low
            for turn in range(4):
                left, right = right, left ^ mix64(right ^ mix64(key + turn)) & low
            number = left << half | right
            if number < size:
                break
        order.append(number)
    return order


def sequences(dataset: Path) -> list[tuple[int, ...]]:
    """Return the training sequences of a dataset, from its files."""
    document = json.loads((dataset / "dataset.json").read_text())
    parts = [
        np.fromfile(dataset / f"{number:06d}" / "train.bin", document["tokenizer"]["dtype"])
        for number in range(len(document["shards"]))
    ]
    tokens = np.concatenate(parts).tolist()
    return [tuple(tokens[start : start + LENGTH]) for start in range(0, len(tokens) - LENGTH, LENGTH)]


def expected_samples(found: list[list[tuple[int, ...]]], parts: list[tuple[int, list[int]]]) -> list[tuple[int, ...]]:
    """Return the tokens of each sample of the run. ``parts``: (samples, weights of the sources), one after another."""
    read, taken = [], [0] * len(found)
    for samples, weights in parts:
        for source in webster(weights, samples):
            size = len(found[source])
            epoch, place = divmod(taken[source], size)
            taken[source] += 1
            seed = SEED + source * 0x9E3779B97F4A7C15
            read.append(found[source][shuffled(size, seed % 2**64, epoch)[place]])
    return read


@pytest.fixture
def files(tmp_path: Path) -> Path:
    draw = random.Random(1)
    folder = tmp_path / "files"
    folder.mkdir()
    for name, count in DOCUMENTS.items():
        rows = [" ".join(f"{name}{draw.randrange(10**6)}" for _ in range(60)) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return folder


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hooks, read = tmp_path / "hooks", tmp_path / "read"
    for folder in (hooks, read):
        folder.mkdir()
    (hooks / "sitecustomize.py").write_text(_RECORDER)
    paths = [str(hooks), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("SAMPLES_READ", str(read))
    return read


def begin(files: Path, *, prepared: bool = True) -> Drill:
    weights = {"web": 7, "code": 2, "books": 1}
    sources = ", ".join(f"{{name: {name}, path: {files / name}.jsonl, weight: {weights[name]}}}" for name in weights)
    settings = {"data__source": "null", "data__sources": f"[{sources}]", "data__tokenizer__vocab_size": 512}
    settings |= {"data__stages": "[{start: 25, weights: {web: 2, code: 3, books: 5}}]", "cluster__gpus_per_node": 4}
    settings |= {"training__seed": SEED, "training__global_batch_size": BATCH, "training__micro_batch_size": 1}
    if prepared:
        prepare_data(drill_spec(files, **settings))
    return submit_drill(files, **settings)


def read_by_ranks(folder: Path) -> tuple[dict[int, set[tuple[int, ...]]], dict[tuple[int, int], int]]:
    """Return the different tokens that were read for each sample, and how often each (world size, sample) was read."""
    tokens, times = defaultdict(set), defaultdict(int)
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            rows = json.loads(line)
            for sample, row in zip(rows["samples"], rows["tokens"], strict=True):
                tokens[sample].add(tuple(row))
                times[rows["world"], sample] += 1
    return tokens, times


def test_ranks_read_the_same_samples_all_along(files: Path, record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"sigkill rank=2 step=13 attempt=1; {slowed({2: 16, 3: 28})}")  # continues at step 10
    drill = begin(files)
    drill.wait_for(lambda: len(drill.beginnings()) == 2)
    for size, step, change in ((2, 15, ()), (3, 27, ("--set", "data.sources.1.weight=12", "--set", "data.stages=[]"))):
        drill.wait_for_step(step)
        assert scaletrain("cancel", drill.run.path).code == 0
        drill.wait_for_end()
        scaletrain("resume", drill.run.path, "--gpus-per-node", size, *change, "--json", code=0)
    drill.wait_for_end()
    assert drill.events("finished"), drill.events()

    changed = drill.events("mixture")[1]
    assert changed["revision"] == 2
    assert changed["batch"] == drill.beginnings()[-1]["step"] + 1
    first = changed["first_sample"]
    assert 24 * BATCH < first == (changed["batch"] - 1) * BATCH < STEPS * BATCH
    datasets = find_prepared(read_record(drill.run).spec.data, drill.run.path.parent)
    assert datasets is not None
    found = [sequences(datasets[name]) for name in DOCUMENTS]
    held_back = {event["source"]: event["sequences"] for event in drill.events("validation-held-back")}
    found = [each[: len(each) - held_back.get(name, 0)] for name, each in zip(DOCUMENTS, found, strict=True)]
    parts = [(24 * BATCH, [7, 2, 1]), (first - 24 * BATCH, [2, 3, 5]), (STEPS * BATCH - first, [7, 12, 1])]
    expected = expected_samples(found, parts)
    tokens, times = read_by_ranks(record)
    assert sorted(tokens) == list(range(STEPS * BATCH))
    assert all(tokens[sample] == {row} for sample, row in enumerate(expected))
    assert {world for world, _ in times} == {2, 3, 4}
    assert all(count == 1 for (world, _), count in times.items() if world != 4)
    assert len(set(expected)) < len(expected), "some sources are read more than once"

    lines = read_metrics(drill.run)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    sources = [source for samples, weights in parts for source in webster(weights, samples)]
    for line in lines:
        if "loss" in line:  # the mean over the sequences of the sources, which are all as long
            counts = Counter(list(DOCUMENTS)[source] for source in sources[(line["step"] - 1) * BATCH :][:BATCH])
            assert {key for key in line if key.startswith("loss/")} == {f"loss/{name}" for name in counts}
            mean = sum(count * line[f"loss/{name}"] for name, count in counts.items()) / BATCH
            assert mean == pytest.approx(line["loss"], rel=1e-4)
        if "validation_loss" in line:
            each = {name: line[f"validation_loss/{name}"] for name in DOCUMENTS}
            assert min(each.values()) <= line["validation_loss"] <= max(each.values())


def test_ranks_do_not_prepare_data_and_a_resume_does(files: Path) -> None:
    drill = begin(files, prepared=False)
    drill.wait_for_end()
    (ended,) = drill.events("attempt-ended")
    assert (ended["exit_code"], drill.step()) == (2, 0)
    assert "web.jsonl" in ended["message"]
    assert not [*drill.run.path.parent.glob("datasets/*/dataset.json")]
    assert scaletrain("resume", drill.run.path, "--json").code == 0
    drill.wait_for_step(2)
    assert scaletrain("cancel", drill.run.path).code == 0
    drill.wait_for_end()
