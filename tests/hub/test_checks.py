import contextlib
import dataclasses
import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.cli.models import find_model
from scaletrain_cli.errors import SpecError
from scaletrain_cli.hub import client
from scaletrain_cli.hub.cache import HubSettings, Listing
from scaletrain_cli.hub.reference import HubError, HubReference
from scaletrain_cli.launch import hub_fetch
from scaletrain_cli.launch.backends.kubernetes.manifest import manifest
from scaletrain_cli.launch.hub_fetch import fetch_to_shared_cache, resolve_commits, shared_cache
from scaletrain_cli.launch.resource_checks.checks import check_external
from scaletrain_cli.launch.submit import create_run, make_record
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.record import documents_of, read_record
from scaletrain_cli.spec import RunSpec, load_spec, loading, parse_spec
from scaletrain_cli.spec.hub_files import hub_environment, hub_uses, with_local_files
from tests.cli.command_line import Ended, scaletrain
from tests.hub import tiny
from tests.hub.conftest import forget
from tests.hub.server import Hub
from tests.launch.conftest import make_plan
from tests.spec.samples import SPEC, load
from tests.tokenizer_kinds import LEGACY, tokenizer_json

REFERENCES = (
    f"model.weights=hf://{tiny.MODEL}@main",
    f"data.source=hf://datasets/{tiny.DATA}@main",
    f"data.tokenizer={{kind: file, path: 'hf://{tiny.MODEL}@main'}}",
)
LARGE = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "a.txt", "b.txt")


def submit(tmp_path: Path, *sets: str, verb: str = "submit", **options: object) -> Ended:
    spec = tiny.write_spec(tmp_path, **options)
    words = ("--dry-run",) if verb == "submit" else ()
    return scaletrain(verb, spec, *words, *(word for one in sets for word in ("--set", one)))


def refused(tmp_path: Path, *sets: str, **options: Any) -> str:
    """Return the error of a submission, in one line."""
    ended = submit(tmp_path, *sets, **options)
    assert ended.code == 2
    return " ".join(ended.err.split())


def made_spec(*sets: str) -> RunSpec:
    return parse_spec(tiny.spec_text(), file="run.yaml", base_dir=Path(), overrides=sets)


def test_a_submission_is_checked_from_lists_and_headers_alone(hub: Hub, tmp_path: Path) -> None:
    tiny.publish(hub)
    ended = submit(tmp_path)
    assert ended.code == 0, ended.err
    assert not hub.downloads("a.txt")
    assert all(one.range for name in LARGE for one in hub.downloads(name))


@pytest.mark.parametrize(
    ("files", "key", "line", "expected"),
    [
        ({"model-00002-of-00002.safetensors": None}, "model.weights", 5, "lacks model-00002-of-00002.safetensors"),
        ({"model.safetensors.index.json": b"{"}, "model.weights", 5, "is not an index of safetensors"),
        ({"model-00001-of-00002.safetensors": b"x" * 99}, "model.weights", 5, "is not a safetensors file"),
        (dict(tiny.shards(hidden=64)), "model.weights", 5, "embed_tokens.weight = [300, 64]: the model has [300, 32]"),
        ({"tokenizer.json": b"[]"}, "data.tokenizer.path", 9, "is not a tokenizer.json"),
        ({"tokenizer.json": None}, "data.tokenizer.path", 9, "has no file tokenizer.json"),
        ({"config.json": None}, "model.hf_config", 4, "has no file config.json"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_repository_is_an_error_with_its_key_and_line(
    hub: Hub, tmp_path: Path, files: dict[str, bytes | None], key: str, line: int, expected: str
) -> None:
    tiny.publish(hub)
    changed = {**tiny.model_files(), **files}
    hub.add(tiny.MODEL, {path: data for path, data in changed.items() if data is not None})
    shown = refused(tmp_path)
    assert expected in shown
    assert f"run.yaml:{line} {key} = hf://{tiny.MODEL}@main" in shown


def test_weights_of_another_configuration_are_refused(hub: Hub, tmp_path: Path) -> None:
    tiny.publish(hub)
    assert "Set model.rope_theta: 10000.0" in refused(tmp_path, "model.rope_theta=500000")


@pytest.mark.parametrize(
    ("token", "options", "expected"),
    [
        (None, {"gated": True}, "is gated, and a reader without a token may not read it (HTTP 401). Accept its"),
        ("hf_revoked", {}, "refuses the token in use (HTTP 401): it is wrong, expired or revoked. Create a new token"),
        (None, {"private": True}, "Check the name; for a private repository, export HF_TOKEN"),
    ],
)
def test_a_repository_that_cannot_be_read_is_refused_before_anything_is_created(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    token: str | None,
    options: dict[str, bool],
    expected: str,
) -> None:
    tiny.publish(hub, **options)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    ended = submit(tmp_path, verb="train")
    shown = " ".join(ended.err.split())
    assert ended.code == 2
    assert expected in shown
    assert "run.yaml:4 model.hf_config" in shown
    assert not (tmp_path / "runs").exists()
    assert "hf_" not in (ended.out + ended.err).replace("hf_config", "")


def test_a_gated_model_needs_a_token_on_its_nodes(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.tokens |= {"hf_accepted"}
    monkeypatch.setenv("HF_TOKEN", "hf_accepted")
    tiny.publish(hub, gated=True)
    slurm = ("cluster.scheduler=slurm", "env={HF_HOME: /local/hf}")
    said = "the nodes that fetch it get no token. Export HF_TOKEN and name it in secret_env"
    assert said in refused(tmp_path, *slurm)
    forget()
    ended = submit(tmp_path, *slurm, "secret_env=[HF_TOKEN]")
    assert ended.code == 0, ended.err
    assert "hf_accepted" not in ended.out + ended.err
    assert "HF_ENDPOINT, HF_HOME" not in ended.err
    assert "HF_ENDPOINT of this environment decide on the hub here" in " ".join(ended.err.split())


def test_tokens_that_files_beside_a_tokenizer_of_the_hub_declare_are_checked(hub: Hub, tmp_path: Path) -> None:
    tiny.publish(hub)
    declared = {"added_tokens_decoder": {"9999": {"content": "<|im_end|>", "special": True}}}
    files = {"tokenizer.json": tiny.tokenizer_json(), "tokenizer_config.json": json.dumps(declared).encode()}
    hub.add("acme/tokens", files)
    shown = refused(tmp_path, "data.tokenizer={kind: file, path: hf://acme/tokens}")
    assert "states <|im_end|> as token 9999, but it gets the id" in shown


def test_an_adapter_of_the_hub_is_compared_with_the_spec(hub: Hub, tmp_path: Path) -> None:
    tiny.publish(hub)
    config = json.dumps({"r": 8, "lora_alpha": 32}).encode()
    factors = tiny.factors(rank=8)
    files = {"adapter_config.json": config, "adapter_model.safetensors": factors, "adapter_model.bin": b""}
    hub.add("acme/adapter", files)
    adapter = "model.adapter={name: lora, rank: 16, weights: 'hf://acme/adapter'}"
    shown = refused(tmp_path, adapter)
    assert "model.adapter.weights = hf://acme/adapter" in shown
    assert "rank" in shown
    assert hub.downloads("adapter_config.json")
    assert submit(tmp_path, adapter.replace("16", "8")).code == 0
    hub.add("acme/other", {**files, "adapter_model.safetensors": tiny.factors(rank=4)})
    said = "q_proj.lora_A.weight = [4, 32]: the adapter of the spec has [8, 32]"
    assert said in refused(tmp_path, adapter.replace("16", "8").replace("acme/adapter", "acme/other"))


def test_a_wrong_reference_is_an_error_of_the_spec(hub: Hub, tmp_path: Path) -> None:
    tiny.publish(hub)
    for setting, expected in (
        ("model.weights=hf://a/b/../c", "has a path that is not one within the repository"),
        ("model.weights=hf://datasets/a/b", "must name a model of the hub, not a data set"),
        ("data.source=hf://a b", "is not the name of a repository"),
    ):
        assert expected in refused(tmp_path, setting, verb="validate")


def test_a_missing_library_is_named_with_its_command(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.publish(hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    shown = refused(tmp_path)
    assert "require huggingface_hub" in shown
    assert "pip install -c constraints.txt '.[hub]'" in shown


def test_the_record_keeps_the_commits_and_the_spec_what_the_user_wrote(hub: Hub) -> None:
    model, data = tiny.publish(hub)
    spec = made_spec()
    made = create_run(spec, make_plan(spec), "kept")
    commits = {f"hf://{tiny.MODEL}@main": model, f"hf://datasets/{tiny.DATA}/train/*.txt": data}
    assert dict(read_record(made.run).hub) == commits
    assert read_record(made.run).spec.transformer.weights == f"hf://{tiny.MODEL}@main"
    assert json.loads(documents_of(made.run, made.record)["run.json"])["hub"] == commits  # as pods get it
    hub.add(tiny.MODEL, tiny.model_files(seed=1))
    forget()
    assert dict(create_run(spec, make_plan(spec), "kept").record.hub) == commits
    assert resolve_commits(spec, os.environ, read_record(made.run).hub) == commits


def test_a_run_without_references_has_no_commits_and_sends_no_request(hub: Hub) -> None:
    text = tiny.spec_text().replace(f"hf_config: hf://{tiny.MODEL}@main", "preset: gpt2")
    local = text.replace(f"hf://{tiny.MODEL}@main", "/w").replace(f"hf://datasets/{tiny.DATA}/train/*.txt", "/d/*")
    spec = parse_spec(local, file="run.yaml", base_dir=Path())
    assert not make_record(spec, make_plan(spec)).hub
    assert not hub.log
    assert with_local_files(spec, {}, HubSettings(Path("/c"))) is spec


def test_nothing_is_read_from_the_hub_for_another_training_program(hub: Hub) -> None:
    tiny.publish(hub)
    assert len(hub_uses(made_spec())) == 3
    assert not hub_uses(made_spec("code.engine=train"))


@pytest.mark.usefixtures("fetched_here")
def test_the_shared_cache_is_filled_before_the_job_is_submitted(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.publish(hub)
    spec = made_spec("cluster.scheduler=slurm", f"env={{HF_HOME: {tmp_path}/shared}}")
    commits = resolve_commits(spec, os.environ)
    assert shared_cache(spec, os.environ) is None  # below /tmp, which each host has for itself
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "hub").mkdir()
    monkeypatch.setattr(hub_fetch, "is_shared", lambda path: True)
    measured = spec.model_copy(update={"env": {**spec.env, "SCALETRAIN_ONLY": "preflight"}})
    fetch_to_shared_cache(measured, commits, os.environ)  # reads no files
    assert not list((tmp_path / "shared").rglob("*.safetensors"))
    fetch_to_shared_cache(spec, commits, os.environ)
    assert len(list((tmp_path / "shared").rglob("snapshots/*/*.safetensors"))) == 2
    assert shared_cache(made_spec(), os.environ) is None  # on this machine the agent fetches


def test_pods_fetch_to_a_volume_of_their_own_unless_env_names_another_place(hub: Hub) -> None:
    tiny.publish(hub)
    kubernetes = ("cluster.scheduler=kubernetes", "cluster.kubernetes={image: r.io/i@sha256:" + "0" * 64
                  + ", runs: {claim: runs}, volumes: [{claim: models, path: /models}]}")  # fmt: skip

    def pod(*sets: str) -> str:
        spec = made_spec(*kubernetes, *sets)
        record = dataclasses.replace(make_record(spec, make_plan(spec), "r"), created=0.0)
        return json.dumps([dict(each) for each in manifest(record, {"run.json": "{}"}).objects], default=str)

    own = pod()
    assert '"emptyDir": {}' in own
    assert '"name": "HF_HOME", "value": "/var/cache/huggingface"' in own
    mounted = pod("env={HF_HOME: /models/hf}")
    assert '"emptyDir": {}' not in mounted
    assert '"value": "/models/hf"' in mounted


@pytest.mark.usefixtures("fetched_here")
def test_every_verb_works_offline_with_a_full_cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.publish(hub)
    spec = load_spec(tiny.write_spec(tmp_path))
    for section in ("model", "data"):
        hub_fetch.fetched_spec(spec, section)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for verb in ("validate", "plan", "submit"):
        forget()
        hub.log.clear()
        assert submit(tmp_path, verb=verb).code == 0
        assert not hub.log
    forget()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    assert f"does not contain {tiny.MODEL}@main" in refused(tmp_path, verb="plan")


@pytest.mark.parametrize("verb", ["validate", pytest.param("plan", marks=pytest.mark.long), "submit"])
def test_the_endpoint_in_env_is_used_by_every_verb_as_on_the_nodes(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    tiny.publish(hub)
    monkeypatch.delenv("HF_ENDPOINT")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # of the shell alone
    sets = ("cluster.scheduler=slurm", f"env={{HF_ENDPOINT: '{hub.url}', HF_HUB_OFFLINE: '0'}}")
    ended = submit(tmp_path, *sets, verb=verb)
    assert ended.code == 0, ended.err
    assert hub.log
    spec = load_spec(tiny.write_spec(tmp_path), sets)
    assert len(resolve_commits(spec, os.environ)) == 2


def test_offline_in_env_lets_no_verb_send_a_request(hub: Hub, tmp_path: Path) -> None:
    """The cache in env is used here, too, if its folder exists here."""
    tiny.publish(hub)
    (tmp_path / "shared").mkdir()
    offline = ("cluster.scheduler=slurm", f"env={{HF_HOME: {tmp_path}/shared, HF_HUB_OFFLINE: '1'}}")
    said = f"the cache {tmp_path}/shared/hub does not contain {tiny.MODEL}@main"
    assert said in refused(tmp_path, *offline, verb="plan")
    spec = load_spec(tiny.write_spec(tmp_path), [one.replace("OFFLINE: '1'", "OFFLINE: '0'") for one in offline])
    for section in ("model", "data"):
        hub_fetch.fetched_spec(spec, section)
    assert list((tmp_path / "shared").rglob("*.safetensors"))
    forget()
    hub.log.clear()
    ended = submit(tmp_path, *offline)
    assert ended.code == 0, ended.err
    assert not hub.log


@pytest.mark.parametrize("of_nodes", ["HF_HUB_OFFLINE: '1'", "HF_ENDPOINT: 'http://127.0.0.1:9'"])
def test_what_only_nodes_see_is_a_note_and_a_full_commit_asks_nobody(hub: Hub, tmp_path: Path, of_nodes: str) -> None:
    model, _ = tiny.publish(hub)
    sets = [
        "model.hf_config=null",
        "model={preset: gpt2, seq_len: 32, weights: 'hf://acme/tiny-llama@" + model + "'}",
        "data={source: python-stdlib, tokenizer: {kind: bpe, vocab_size: 300}}",
        "cluster.scheduler=slurm",
        f"env={{HF_HOME: /no/such/folder, {of_nodes}}}",
    ]
    spec = load_spec(tiny.write_spec(tmp_path), sets)
    hub.log.clear()
    found = check_external(spec)
    assert [note.code for note in found.warnings].count("hub.not-checked") == 1
    assert not [problem for problem in found.problems if problem.key == "model.weights"]
    assert resolve_commits(spec, os.environ) == {spec.transformer.weights: model}
    assert not hub.log


@pytest.mark.long
def test_a_model_is_planned_from_the_endpoint_in_env(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.publish(hub)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert scaletrain("plan", f"hf://{tiny.MODEL}", "--set", f"env.HF_ENDPOINT={hub.url}").code == 0


def test_without_the_library_the_extra_is_named(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = tiny.publish(hub)
    sets = tuple(
        f"{key}=hf://{tiny.MODEL}@{model}" for key in ("model.hf_config", "model.weights", "data.tokenizer.path")
    )
    assert submit(tmp_path, *sets).code == 0
    forget()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    shown = refused(tmp_path, *sets)
    assert "Traceback" not in shown
    assert "model.weights" in shown
    assert "'.[hub]'" in shown


def test_an_evaluation_reads_the_commit_of_its_run_although_the_branch_has_moved(hub: Hub) -> None:
    model, _ = tiny.publish(hub)
    spec = made_spec()
    run = create_run(spec, make_plan(spec), "run")
    hub.add(tiny.MODEL, tiny.model_files(seed=1))
    forget()
    of_run = made_spec("code.engine=scaletrain_cli.engine.evaluation")
    made = create_run(of_run, make_plan(of_run), "evaluation", hub=run.record.hub)
    assert read_record(made.run).hub[f"hf://{tiny.MODEL}@main"] == model
    local = with_local_files(of_run, made.record.hub, HubSettings(Path("/cache")))
    assert local.transformer.weights == f"/cache/models--acme--tiny-llama/snapshots/{model}"


@pytest.mark.parametrize("scheduler", ["slurm", "local"])
@pytest.mark.parametrize("home", ["~x/\0", "/" + "x" * 300, "/closed/hf"], ids=["nul", "long", "closed"])
def test_a_cache_in_env_that_cannot_be_looked_at_is_not_used_here(
    monkeypatch: pytest.MonkeyPatch, home: str, scheduler: str
) -> None:
    def is_dir(path: Path) -> bool:  # as for a user who may not search the folder, which root may
        if path.is_relative_to("/closed"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return os.path.isdir(path)

    if home == "/closed/hf":
        monkeypatch.setattr(Path, "is_dir", is_dir)
    for text in (tiny.spec_text(), SPEC):
        with contextlib.suppress(SpecError):
            env = json.dumps({"HF_HOME": home, "HF_HUB_OFFLINE": "1"})
            overrides = [f"env={env}", f"cluster.scheduler={scheduler}"]
            parse_spec(text, file="run.yaml", base_dir=Path(), overrides=overrides)
    here = hub_environment({"HF_HOME": home}, (), {"HF_HUB_CACHE": "/mine"}, runs_here=False)
    assert here == {"HF_HUB_CACHE": "/mine"}


def test_the_hub_is_not_looked_at_for_a_spec_without_a_config_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(loading, "hub_environment_of", lambda *args, **_: asked.append(args))
    load(SPEC, "env={HF_HOME: /x}")
    assert asked == []


def test_the_token_is_sent_to_an_endpoint_in_env_only_if_the_spec_names_the_token() -> None:
    mine = {"HF_TOKEN": "hf_mine", "HOME": "/none"}
    mirror = {"HF_ENDPOINT": "http://mirror"}

    def token(env: dict[str, str], *secret_env: str, here: dict[str, str] = mine) -> list[str | None]:
        return [
            HubSettings.from_environment(hub_environment(env, secret_env, here, runs_here=runs_here)).token
            for runs_here in (False, True)
        ]

    assert token({}) == ["hf_mine"] * 2
    assert token({"HF_ENDPOINT": "https://huggingface.co/"}) == ["hf_mine"] * 2
    assert token(mirror) == [None] * 2
    assert token(mirror, "HF_TOKEN") == ["hf_mine"] * 2
    assert token(mirror, here=mine | mirror) == ["hf_mine"] * 2
    assert token({**mirror, "HF_TOKEN": "hf_given"}) == ["hf_given"] * 2
    assert token({**mirror, "HF_TOKEN_PATH": "/none"}) == [None] * 2


def test_a_model_by_name_is_read_as_for_a_run_by_the_scheduler(hub: Hub, tmp_path: Path) -> None:
    tiny.publish(hub)
    find_model(f"hf://{tiny.MODEL}", [f"env.HF_HOME={tmp_path}/none/hf"], "slurm")
    assert not (tmp_path / "none").exists()
    find_model(f"hf://{tiny.MODEL}", [f"env.HF_HOME={tmp_path}/none/hf"], "local")
    assert (tmp_path / "none").exists()


def test_a_spec_for_a_model_of_the_hub_states_the_class_that_keeps_its_tokens(hub: Hub) -> None:
    folder = {
        "config.json": tiny.model_files()["config.json"],
        "tokenizer_config.json": b'{"tokenizer_class": "LlamaTokenizer"}',
        "tokenizer.json": json.dumps(json.loads(tokenizer_json("metaspace", ("<s>", "</s>"))) | LEGACY).encode(),
    }
    hub.add("org/llama-2", folder)
    assert find_model("hf://org/llama-2", reads_tokenizer=True).tokenizer_class == "PreTrainedTokenizerFast"
    assert find_model("hf://org/llama-2").tokenizer_class is None


def test_a_silent_mirror_is_asked_once_a_repository(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository of the model is named by two keys, and the notes look at it once more."""
    asked: list[str] = []

    def silent(reference: HubReference, settings: HubSettings) -> Listing:
        asked.append(reference.repo)
        raise HubError(Reason("hub.unreachable", {"endpoint": settings.endpoint, "said": "timeout"}), temporary=True)

    monkeypatch.setattr(client, "_ask", silent)
    env = "env={HF_ENDPOINT: 'http://mirror', HF_HOME: /local/hf}"
    spec = parse_spec(SPEC, file="run.yaml", base_dir=Path(), overrides=["cluster.scheduler=slurm", env, *REFERENCES])
    found = check_external(spec, str(tmp_path))
    assert "hub.not-checked" in [note.code for note in found.warnings]
    assert sorted(asked) == sorted({tiny.MODEL, tiny.DATA})
