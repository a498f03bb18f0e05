"""Rehearsals of real small runs: each planted mistake is found by the item that it is of, and good specs pass."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scaletrain_cli.data.prepared import prepare_run_datasets
from scaletrain_cli.diagnosis.rehearsal import ITEMS, VARIABLE, Options, Rehearsal, read_rehearsal
from scaletrain_cli.engine.data.prepared import prepare_rows
from scaletrain_cli.launch.short_jobs import rehearsal_spec
from scaletrain_cli.spec.loading import parse_spec
from tests.cli.command_line import PROJECT, scaletrain
from tests.diagnosis.injected_bugs.specs import IMAGES, TEXT, write_data
from tests.drills.campaign.forked_attempts import ForkedRun

pytestmark = [pytest.mark.drill, pytest.mark.long]

BUDGET_SECONDS = 5.0
# What is left out where another item must find the mistake, because it takes most of the time.
SLOW = ("learning-rate", "overfit", "preemption")
TIMED = {"data-rate"}  # which a busy machine fails
ROWS = """
schema: scaletrain/v1
name: rows
model: {family: llama, hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
  intermediate_size: 96, vocab_size: 384, seq_len: 128}
data: {source: rows.jsonl, tokenizer: {kind: bpe, vocab_size: 384}, packing: best_fit}
training: {objective: sft, global_batch_size: 8, steps: 160, precision: fp32,
  optimizer: {name: adamw, lr: 5.0e-3, weight_decay: 0.0}, schedule: {name: cosine, warmup_steps: 16}}
evaluation: {every: 0}
cluster: {scheduler: local, nodes: 1, gpus_per_node: 1, gpu: cpu}
checkpoint: {every: 40}
"""
PICTURES = IMAGES.replace("source: sklearn-digits", "source: pictures").replace("num_labels: 10", "num_labels: 2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data to train on."""
    path = tmp_path_factory.mktemp("runs")
    write_data(path)
    return path


@pytest.fixture
def folder(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder, as this test's runs root and working folder."""
    monkeypatch.setenv("SCALETRAIN_RUNS", str(data))
    monkeypatch.chdir(data)
    return data


def good_rows(number: int) -> dict[str, str]:
    return {"prompt": f"How many are {number} and {number % 7}?", "completion": f"They are {number + number % 7}."}


def long_prompts(number: int) -> dict[str, str]:
    question = " ".join(f"Consider {number * place % 997} too." for place in range(12))
    return {"prompt": question, "completion": "No"}


def equal_rows(number: int) -> dict[str, str]:
    return good_rows(number % 5)


@dataclass(frozen=True)
class Mistake:
    """A spec with a mistake, or a fault of the engine or the data, and the item that must find it."""

    item: str
    text: str = TEXT
    overrides: tuple[str, ...] = ()
    fault: str = ""
    rows: Callable[[int], dict[str, str]] | None = None
    key: str = ""  # the first one to change


MISTAKES = {
    "learning rate x 300": Mistake(
        "learning-rate", overrides=("training.optimizer.lr=1.5",), key="training.optimizer.lr"
    ),
    "learning rate / 300": Mistake(
        "learning-rate", overrides=("training.optimizer.lr=1.6e-5",), key="training.optimizer.lr"
    ),
    "first weights x 25": Mistake(
        "first-loss", overrides=("model.initializer_range=0.5",), key="model.initializer_range"
    ),
    "labels shifted twice": Mistake("labels", fault="labels offset=2", key="data"),
    "labels not shifted": Mistake("labels", fault="labels offset=0", key="data"),
    "tokens that see later ones": Mistake("causality", fault="non-causal"),
    "slow storage of the data": Mistake("data-rate", fault="slow-data seconds=0.25", key="data.loader.workers"),
    "prompts that fill the rows": Mistake("labels", text=ROWS, rows=long_prompts, key="data.loss_on"),
    "the same rows again and again": Mistake(
        "duplicates", text=ROWS, overrides=("data.packing=none",), rows=equal_rows, key="data"
    ),
    "labels of one class": Mistake("labels", text=PICTURES, key="data"),
    "a full disk for checkpoints": Mistake("restore", fault="disk-full write=1"),
}
GOOD = {
    "text": (TEXT, None),
    "two ranks": (TEXT.replace("gpus_per_node: 1", "gpus_per_node: 2"), None),
    "rows": (ROWS, good_rows),
    "images": (IMAGES, None),
}


def rehearsed(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    overrides: tuple[str, ...] = (),
    fault: str = "",
    rows: Callable[[int], dict[str, str]] | None = None,
    items: tuple[str, ...] = tuple(ITEMS),
    budget_seconds: float = BUDGET_SECONDS,
) -> tuple[Rehearsal, ForkedRun]:
    """Rehearse a run in forked ranks, until its job would end."""
    if rows is not None:
        (place / "rows.jsonl").write_text("".join(json.dumps(rows(number)) + "\n" for number in range(400)))
    options = Options(items, budget_seconds)
    spec = rehearsal_spec(parse_spec(text, file="run.yaml", base_dir=place, overrides=overrides), options)
    prepare_run_datasets(spec, place, {}, 1, lambda *_: None) if rows is None else prepare_rows(spec, place)
    monkeypatch.setenv("SCALETRAIN_ONLY", "rehearsal")
    monkeypatch.setenv(VARIABLE, options.to_text())
    forked = ForkedRun.create(spec)
    while forked.attempt(fault=fault).exit_codes == [75] * spec.world_size:
        pass
    found = read_rehearsal(forked.run)
    assert found is not None, forked.log()
    return found, forked


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = MISTAKES[name]
    if planted.text is PICTURES:
        draw_pictures(folder / "pictures")
    items = tuple(name for name in ITEMS if name not in SLOW or name == planted.item)
    found, forked = rehearsed(folder, monkeypatch, planted.text, planted.overrides, planted.fault, planted.rows, items)
    failed = [item.name for item in found.items if item.verdict == "failed"]
    if name == "a full disk for checkpoints":
        assert (failed, found.running) == ([], planted.item), "the job ends in this item"
        return
    verdicts = [f"{item.name} {item.verdict}: {item.reason}" for item in found.items]
    assert planted.item in failed, [*verdicts, forked.log()]
    item = found.item(planted.item)
    assert item is not None
    changes = [cause.change.key for cause in item.causes if cause.change is not None]
    assert changes[:1] == ([planted.key] if planted.key else []), verdicts


@pytest.mark.parametrize("name", GOOD)
def test_a_good_spec_passes_every_item(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, rows = GOOD[name]
    found, forked = rehearsed(folder, monkeypatch, text, rows=rows, budget_seconds=4 * BUDGET_SECONDS)
    verdicts = {item.name: f"{item.verdict}: {item.reason}" for item in found.items}
    assert list(verdicts) == list(ITEMS), forked.log()
    assert {name for name, text in verdicts.items() if text.startswith("failed")} <= TIMED, verdicts
    left_out = {"causality"} if text is IMAGES else set()
    assert {name for name, text in verdicts.items() if text.startswith("skipped")} == left_out, verdicts
    preemption = found.item("preemption")
    assert preemption is not None
    assert preemption.figures["resumed_from_step"] == 3, "the signal arrives before the third step, which ends"
    assert found.measured["step"]["step_seconds"] > 0
    assert found.measured["layout"]["world_size"] == len(list(forked.run.attempt(1).glob("rank-*.pid")))


def test_the_verb_passes_a_good_recipe(folder: Path) -> None:
    """With the supervisor, which starts the second attempt after the injected preemption."""
    recipe = PROJECT / "recipes/vision-digits-cpu.yaml"
    ended = scaletrain("rehearse", recipe, "--yes", "--budget", "30s", "--plot", "range.svg", "--json")
    answer = ended.data
    verdicts = {item["item"]: item["verdict"] for item in answer["items"]}
    failed = {name for name, verdict in verdicts.items() if verdict == "failed"}
    assert failed <= TIMED
    assert (answer["passed"], answer["complete"]) == (not failed, True)
    assert verdicts.keys() == ITEMS.keys()
    assert {name for name, verdict in verdicts.items() if verdict == "skipped"} == {"causality"}
    assert (folder / "range.svg").read_text().count("<svg") == 1


@pytest.mark.parametrize(("name", "budget_seconds"), [("llama-10m-cpu", 100.0), ("vision-digits-cpu", 20.0)])
def test_the_suggested_rate_is_near_the_best_of_a_recorded_sweep(
    name: str, budget_seconds: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has the command of each sweep; it was run once."""
    sweep = json.loads((Path(__file__).parent / "learning_rate_sweeps.json").read_text())["sweeps"][name]
    losses = {float(rate): loss for rate, loss in sweep["validation_loss"].items()}
    assert len(losses) == 7
    best = min(losses, key=losses.__getitem__)
    text = (PROJECT / sweep["spec"]).read_text()
    found, forked = rehearsed(folder, monkeypatch, text, items=("learning-rate",), budget_seconds=budget_seconds)
    item = found.item("learning-rate")
    assert item is not None, forked.log()
    assert item.verdict == "passed", item.reason
    assert best / 3 <= item.figures["suggestion"] <= best * 3, item.figures


def draw_pictures(place: Path) -> None:
    """Write a folder for each of two classes, one of which has a single image."""
    chance = np.random.default_rng(0)
    for name, count in (("cat", 320), ("dog", 1)):
        (place / name).mkdir(parents=True)
        for number in range(count):
            pixels = chance.integers(0, 255, (16, 16), dtype=np.uint8)
            Image.fromarray(pixels, "L").save(place / name / f"{number}.png")
