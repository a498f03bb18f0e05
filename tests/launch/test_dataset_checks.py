"""Prepared data that a run cannot use are refused before it is queued."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.data.images.compatibility import caption_tokenizer_digest, require_same_tokenizer
from scaletrain_cli.errors import InfeasibleError, UsageError
from scaletrain_cli.launch.data_summary import _infeasible
from scaletrain_cli.launch.dataset_checks import dataset_problems, require_same_data, require_usable
from scaletrain_cli.launch.resource_checks.checks import check_external
from scaletrain_cli.launch.resource_checks.view import View
from scaletrain_cli.rundir.checkpoints import Checkpoint
from tests.launch.conftest import make_spec

SOURCES = "data.sources=[{name: web, path: /d/web, weight: 1}, {name: code, path: /d/code, epochs: 2}]"


def dataset(root: Path, source: str, tokens: int) -> dict[str, Any]:
    folder = root / "datasets" / source
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dataset.json").write_text(json.dumps({"train_tokens": tokens, "fingerprint": source * 20}))
    return {"source": source, "folder": source, "fingerprint": source * 20}


def test_a_source_without_a_sequence_and_epochs_that_take_the_whole_run_are_refused(tmp_path: Path) -> None:
    spec = make_spec("data.source=null", SOURCES)
    length, samples = spec.transformer.seq_len, spec.total_steps * spec.training.global_batch_size
    web = dataset(tmp_path, "web", 10 * length)
    with pytest.raises(UsageError) as refused:
        require_usable(spec, tmp_path, [web, dataset(tmp_path, "code", length)])
    (problem,) = refused.value.problems
    assert (problem.key, problem.given) == ("data.sources.1.path", "/d/code")
    assert f"fewer tokens than one sequence of {length}" in problem.message
    require_usable(spec, tmp_path, [web, dataset(tmp_path, "code", length + 1)])
    with pytest.raises(InfeasibleError, match="the epochs of code take"):
        require_usable(spec, tmp_path, [web, dataset(tmp_path, "code", samples * length // 2 + 1)])
    require_usable(spec, tmp_path, [dataset(tmp_path, "code", samples * length)])  # that of web is not known


@pytest.mark.parametrize("several", [True, False])
def test_a_checkpoint_of_other_data_is_refused_before_the_queue(several: bool, tmp_path: Path) -> None:
    spec = make_spec("data.source=null", SOURCES)
    found = [dataset(tmp_path, "web", 1), dataset(tmp_path, "code", 1)]
    for saved, is_refused in (("web" * 20, False), ("other", True)):
        client = {"dataset": saved, **({"sources": {"web": saved}} if several else {})}
        (tmp_path / "state.json").write_text(json.dumps({"client": client}))
        checkpoint = Checkpoint(tmp_path, 1, 1, True, 1, {})
        if is_refused:
            with pytest.raises(UsageError, match="was trained on dataset other and this one is webwebwebweb"):
                require_same_data(spec, checkpoint, found)
        else:
            require_same_data(spec, checkpoint, found)
    (tmp_path / "state.json").unlink()
    require_same_data(spec, checkpoint, found)  # one of another engine


@pytest.mark.parametrize("saved", ["same", "other", None])
def test_a_checkpoint_of_captions_with_another_tokenizer_is_refused(saved: str | None, tmp_path: Path) -> None:
    clip = ("model={family: clip, preset: clip-vit-base-patch32}", "data.source=pairs", "data.tokenizer.kind=file")
    spec = make_spec(*clip, "data.tokenizer.path=tokenizer.json", "evaluation.every=0")
    (tmp_path / "tokenizer.json").write_text("the same")
    digest = hashlib.sha256(b"the same").hexdigest()
    assert caption_tokenizer_digest(spec, tmp_path) == digest
    stated = {} if saved is None else {"caption_tokenizer": digest if saved == "same" else "0" * 64}
    (tmp_path / "state.json").write_text(json.dumps({"client": {"dataset": "d", **stated}}))
    checkpoint = Checkpoint(tmp_path, 1, 1, True, 1, {})
    if saved != "other":
        require_same_data(spec, checkpoint, [], tmp_path)
        return
    with pytest.raises(UsageError, match=r"another tokenizer than .*tokenizer\.json is now: SHA-256 0000000000") as bad:
        require_same_data(spec, checkpoint, [], tmp_path)
    assert "or start a new run" in str(bad.value)
    require_same_data(spec, checkpoint, [], tmp_path / "elsewhere")  # what the nodes alone see, the ranks check


@pytest.mark.parametrize("name", ["eos_token", "pad_token", "bos_token"])
def test_a_checkpoint_of_captions_with_other_special_tokens_is_refused(name: str, tmp_path: Path) -> None:
    clip = ("model={family: clip, preset: clip-vit-base-patch32}", "data.source=pairs", "data.tokenizer.kind=file")
    spec = make_spec(*clip, "data.tokenizer.path=tokenizer.json", "evaluation.every=0")
    (tmp_path / "tokenizer.json").write_text("the same")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"unk_token": "?", "model_max_length": 77}))
    assert caption_tokenizer_digest(spec, tmp_path) == hashlib.sha256(b"the same").hexdigest()
    config.write_text(json.dumps({name: "<a>"}))
    saved = {"caption_tokenizer": caption_tokenizer_digest(spec, tmp_path)}
    require_same_tokenizer(spec, "step-1", saved, tmp_path)
    config.write_text(json.dumps({name: {"content": "<b>"}}))
    with pytest.raises(UsageError, match="another tokenizer"):
        require_same_tokenizer(spec, "step-1", saved, tmp_path)
    config.unlink()
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({name: {"content": "<a>"}}))
    require_same_tokenizer(spec, "step-1", saved, tmp_path)


def test_a_dataset_without_a_sequence_is_a_problem_of_the_spec_and_epochs_of_the_plan(tmp_path: Path) -> None:
    code = "{name: code, path: python-stdlib, weight: 1}"
    sources = f"data.sources=[{{name: web, path: {tmp_path}/datasets/web, epochs: 2}}, {code}]"
    spec = make_spec("data.source=null", sources)
    dataset(tmp_path, "web", 1)
    found = [problem for problem in check_external(spec).problems if problem.key == "data.sources.0.path"]
    assert any("too little text to train on" in problem.message for problem in found)
    dataset(tmp_path, "web", spec.total_steps * spec.training.global_batch_size * spec.transformer.seq_len)
    assert not list(dataset_problems(View(spec, tmp_path, {})))
    reason = _infeasible(spec, {"web": spec.total_steps * spec.training.global_batch_size})
    assert reason.code == "data.epochs-exceed-run"
    assert _infeasible(spec, {"web": 1}) is None
    assert _infeasible(spec, {}) is None
