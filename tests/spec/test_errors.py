import typing
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pydantic import BaseModel

from scaletrain_cli.errors import ExitCode, Problem, SpecError
from scaletrain_cli.spec import ModelSpec, RunSpec, load_spec
from tests.spec.samples import SPEC, error, line_of, load, problem, problems


def test_all_problems_are_reported_at_once_each_at_its_line() -> None:
    text = SPEC.replace("hidden_size: 64", "hiden_size: 64").replace("precision: fp32", "precision: bf61")
    text += "layout: {zero_stage: 4}\ncheckpoint:\n  keep: 0\nevaluation:\n  every: -1\n"
    found = {str(one.key): one for one in problems(text)}
    assert found.keys() == {
        "model.hidden_size",
        "model.hiden_size",
        "training.precision",
        "layout.zero_stage",
        "checkpoint.keep",
        "evaluation.every",
    }
    assert found["training.precision"].where == f"run.yaml:{line_of(text, 'bf61')}"
    assert found["layout.zero_stage"].where == f"run.yaml:{line_of(text, 'layout')}"
    assert found["checkpoint.keep"].where == f"run.yaml:{line_of(text, 'keep')}"
    assert found["model.hidden_size"].where == f"run.yaml:{line_of(text, 'model:')}"


def test_the_message_names_the_file_and_counts_the_problems() -> None:
    assert error(SPEC.replace("fp32", "fp23")).message == "run.yaml: 1 problem in the run spec"
    assert error(SPEC.replace("fp32", "fp23") + "a: 1\n").message == "run.yaml: 2 problems in the run spec"
    assert error(SPEC + "a: 1\n").exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.precision=bf61", "must be 'fp32', 'tf32', 'bf16', 'fp16', 'fp8' or 'fp4'. Did you mean bf16?"),
        ("training.precision=BF16", "Did you mean bf16?"),
        ("training.precision=Fp16", "Did you mean fp16?"),
        ("training.optimizer.name=AdamW", "Did you mean adamw?"),
        ("cluster.scheduler=Slurm", "Did you mean slurm?"),
        ("cluster.kubernetes.spot_taint=GKE", "Did you mean gke?"),
        ("model.family=LLaMA", "Did you mean llama?"),
        ("model={preset: LLaMA-7B}", "Did you mean llama-7b?"),
        ("Training.steps=3", "Training: unknown key. Did you mean training?"),
        ("model.family={a: 1}", "must be one of llama, gpt, resnet, convnext, vit, clip, llava."),
        ("trainin.steps=3", "trainin: unknown key. Did you mean training? Known keys: schema, name,"),
        ("model.hidden=3", "model.hidden: unknown key. Did you mean hidden_size? Known keys: family,"),
        ("training.steps=1e3", "training.steps = 1000.0: must be a whole number. Use 1000."),
        ("training.steps=true", "training.steps = true: must be a whole number."),
        ("training.steps='5'", "training.steps = 5: must be a whole number. Remove quotes and units."),
        ("training.steps=0", "training.steps = 0: must be at least 1."),
        ("training.steps=99999999999", "training.steps = 99999999999: must be at most 1000000000."),
        ("training.optimizer.lr=true", "training.optimizer.lr = true: must be a number, not true or false."),
        ("training.optimizer.lr=0", "training.optimizer.lr = 0: must be above 0."),
        ("training.optimizer.lr=.nan", "training.optimizer.lr = nan: must be a finite number."),
        ("training.optimizer.betas=[0.9]", "training.optimizer.betas = [0.9]: has too few items."),
        ("training.optimizer.betas=[0.9, 0.9, 0.9]", "must have 2 items."),
        ("data.skip=[[0, 3]]", "data.skip.0.0 = 0: must be at least 1."),
        ("data.skip=[5]", "data.skip.0 = 5: must be a list."),
        ("data.skip=[[2, 3], [9, 7]]", "data.skip: [9, 7] has its first batch after its last. Use [7, 9]."),
        ("model.hidden_size=66", "cannot be derived: hidden_size = 66 is not a multiple of num_attention_heads"),
        ("training.optimizer=adamw", "training.optimizer = adamw: must be a section (a mapping of keys)."),
        ("training.micro_batch_size=0", "must be a whole number of at least 1, or auto."),
        (
            "checkpoint.in_memory=0",
            "checkpoint.in_memory = 0: must be a whole number of at least 1, or auto or off.",
        ),
        ("checkpoint.in_memory=on", "must be a whole number of at least 1, or auto or off."),
        ("checkpoint.async=2", "checkpoint.async = 2: must be true or false."),
        ("cluster.gpu=[1]", "cluster.gpu = [1]: must be a name in the hardware catalogue, cpu, or a table"),
        ("cluster.gpu={name: x}", "cluster.gpu.memory: is missing."),
        ("cluster.price_per_gpu_hour=-1", "must be US dollars per GPU and hour, or auto."),
        ("cluster.slurm.partition=a b", "must be one word of letters, digits and _.,:=/@%+*[]-&|!(), for a"),
        (
            "cluster={scheduler: slurm, nodes: 2, gpu: h100-sxm-80gb, slurm: {gres_type: h100_1g.10gb}}",
            "must be 1: NCCL does not connect parts of GPUs (h100_1g.10gb, MIG).",
        ),
        ("cluster.slurm.account=3", "cluster.slurm.account = 3: must be text. Put it in quotes."),
        ("cluster.slurm.exclude=n1,n[a-c]", "exclude = n1,n[a-c]: must be a hostlist, such as n[1-4,7],login1."),
        ("cluster.slurm.nodelist=n[]", "nodelist = n[]: must be a hostlist, such as n[1-4,7],login1."),
        ("cluster.slurm.nodelist=n[4-2]", "nodelist = n[4-2]: must be a hostlist, such as n[1-4,7],login1."),
        ("cluster.slurm.nodelist=n[1-3", "nodelist = n[1-3: must be a hostlist, such as n[1-4,7],login1."),
        ("cluster.slurm.nodelist=n[1-9999999]", "= n[1-9999999]: names 9,999,999 nodes; Slurm allows 65,536."),
        ("cluster.slurm.extra={clusters: west}", "cluster.slurm.extra.clusters = west: is not possible: the other"),
        ("cluster.slurm.extra={Time: 3}", "must be the name of a long option of sbatch without its dashes"),
        ("cluster.slurm={time: 90s}", "must be at least 240 s: ranks are signaled 120 s before the end"),
        ("cluster.slurm.extra.time=3", "is set by the launcher or by another key of this section; remove it"),
        ("restarts.preemption=often", "must be a whole number of at least 0, or unlimited."),
        ("env={OMP_NUM_THREADS: 4}", 'env.OMP_NUM_THREADS = 4: must be text. Put it in quotes: "4".'),
        ("env={1A: b}", "must be the name of an environment variable: letters, digits and _, not starting with"),
        ("secret_env=[A-B]", "must be the name of an environment variable"),
        ("cluster.slurm.activate=venv", "slurm.activate = venv: must be an absolute path on one line."),
        ("cluster.slurm.activate_arguments=[a]", "activate_arguments: has no effect without slurm.activate"),
        ("cluster.slurm.activate=''", "slurm.activate = : must not be empty."),
        ("cluster.slurm.modules=[-x]", "slurm.modules.0 = -x: must be the name of an environment module, such as cuda"),
        ("cluster.slurm.container={image: -x}", "container.image = -x: must be an image file or URL on one line"),
        ("cluster.slurm.container={image: x, mounts: [a]}", "mounts.0 = a: must be SOURCE[:TARGET[:OPTIONS]] with an"),
        ("cluster.slurm.container={image: x, python: a}", "must be python3, or an absolute path in the image"),
        ("code.engine=train.py!", "code.engine = train.py!: must be the dotted name of a Python module, such as train"),
        ("code.command=python train.py", "code.command = python train.py: must be a list."),
        ("code.command=[]", "code.command: must begin with a program, such as [python, train.py]."),
        ("code={engine: a, command: [b]}", "code.command: cannot be combined with code.engine."),
        ("code.on_nodes=here", "code.on_nodes = here: must be the absolute path of a folder, on one line."),
        ("code.import_root=/src", "code.import_root = /src: must be a relative path of a folder, on one line."),
        ('env={A: "a\\0"}', "env.A = a\\x00: must not contain a NUL character."),
        ("layout.tensor_sequence_parallel=maybe", "= maybe: must be true, false or auto."),
        ("name=''", "name = : must not be empty."),
        ("name=' '", "name =  : must not be blank."),
        ("env={PATH: '$PATH:/opt/bin'}", "is not expanded: programs would get the text $PATH. Write the whole value."),
        ("env={A: 'x${HOME}'}", "is not expanded: programs would get the text $HOME. Write the whole value."),
        ("cluster.slurm.time=2880", "has no unit, and sbatch counts minutes: write 2880m, or 2880s."),
        ('name="a\\0b"', "name = a\\x00b: must not contain a NUL character."),
        ('name="\\ud800"', "name = \\ud800: must be text that can be written as UTF-8."),
        ("training.tokens=10M", "exactly one of steps, tokens, samples and epochs must be set; null unsets one."),
        # contradictions
        ("model.num_key_value_heads=3", "must divide num_attention_heads = 4; use 1, 2 or 4."),
        ("model.head_dim=15", "must be even, because rotary positions rotate pairs of channels."),
        ("training.micro_batch_size=3", "must divide global_batch_size = 8."),
        ("training.schedule.min_lr=1", "must not exceed optimizer.lr = 0.0003."),
        ("training.schedule.warmup_steps=11", "must not exceed steps = 10."),
        ("training.schedule={name: wsd, warmup_steps: 6, cooldown_steps: 5}", "steps = 10 together with warmup_steps."),
        ("training.schedule.name=step", "schedule.step_size = 0: must be at least 1 with schedule.name: step."),
        ("training.loss_scale.initial=1000", "initial = 1000: must be a power of two. Use 512 or 1024."),
        ("training.loss_scale={initial: 8, minimum: 16}", "minimum = 16: must not exceed loss_scale.initial = 8."),
        ("model.capacity_factor=1.25", "model.num_experts = 0: must be at least 1 when capacity_factor, router_z_loss"),
        ("training.grad_dtype=bf16", "must be fp32 with precision: fp32."),
        ("layout.tensor_parallel=3", "must divide 4 attention heads. Use 1, 2 or 4."),
        ("layout.pipeline_parallel=3", "must not exceed 2 layers."),
        (
            "model={preset: llama-7b, adapter: {name: lora}, num_hidden_layers: 4097}",
            "must not exceed 4096 with adapter or quantization.",
        ),
        ("data.tokenizer.vocab_size=513", "must not exceed model.vocab_size = 512."),
        ("data.tokenizer.kind=file", "data.tokenizer.path: is required with kind: file."),
        ("data.tokenizer={kind: tiktoken, path: a}", "data.tokenizer.encoding: is required with kind: tiktoken"),
        (
            "data.tokenizer={kind: tiktoken, path: a, pattern: b}",
            "data.tokenizer.special_tokens: must have a token that ends documents",
        ),
        (
            "data.tokenizer={kind: tiktoken, path: a, encoding: gpt2, special_tokens: [</s>]}",
            "special_tokens: has no effect with encoding: gpt2",
        ),
        ("data.tokenizer={kind: sentencepiece, path: hf://a/b}", "must be a local file with kind: sentencepiece."),
        ("data.tokenizer.path=a.json", "data.tokenizer.path = a.json: requires kind: file, sentencepiece or tiktoken."),
        ("cluster.nodes=2", "must be 1 with scheduler: local, which runs on this machine only."),
    ],
)
def test_a_wrong_value_or_contradiction_is_rejected_with_what_is_allowed(override: str, expected: str) -> None:
    lines = [str(one) for one in problems(SPEC, override)]
    assert any(expected in line for line in lines), lines


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["kinds", "every key"])
def test_a_value_of_a_wrong_type_is_one_problem(every: bool) -> None:
    keys = dict(every_key())
    one_of_each_kind = {kind: key for key, kind in keys.items()}.values()
    assert 30 < len(one_of_each_kind) < len(keys)
    wrong = ("[1]", "BF16", '"a\\0b"', "-7")
    for number, key in enumerate(keys if every else one_of_each_kind):
        for given in wrong if every else (wrong[number % 4],):
            found = [one for one in _problems_or_none(f"{key}={given}") if one.key == key]
            assert len(found) <= 1, found
            for one in found:
                assert "NUL" not in one.message or "\\0" in given, one
                assert "sbatch" not in one.message.lower() or key.startswith("cluster.slurm"), one
                assert "pattern" not in one.message, one


def _problems_or_none(override: str) -> Sequence[Problem]:
    try:
        load(SPEC, override)
    except SpecError as error:
        return error.problems
    return ()


def every_key(section: type[BaseModel] = RunSpec, before: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys of all fields, those of the sections that may be left out too, each with its type."""
    for name, field in section.model_fields.items():
        key = f"{before}{field.alias or name}"
        yield key, f"{field.annotation} {key.startswith('cluster.slurm')}"
        kinds = [ModelSpec] if key == "model" else [field.annotation, *typing.get_args(field.annotation)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from every_key(kind, f"{key}.")


def test_a_problem_in_an_item_of_a_list_is_named_by_its_number_and_the_keys_of_its_kind() -> None:
    tasks = "[{kind: loss, name: a, source: b, documentz: 3}, {kind: generation, name: b, prompts: 4}]"
    with pytest.raises(SpecError) as error:
        load(f"{SPEC}evaluation:\n  tasks: {tasks}\n")
    unknown, wrong = error.value.problems
    assert (unknown.key, unknown.hint) == (
        "evaluation.tasks.0.documentz",
        "Did you mean documents? Known keys: kind, name, source, documents.",
    )
    assert (wrong.key, wrong.message) == ("evaluation.tasks.1.prompts", "must be a list.")


def test_early_stopping_needs_a_validation_loss() -> None:
    changes = ("training.early_stopping.patience=3", "evaluation.every=0")
    assert "requires a validation loss. Set evaluation.every above 0." in problem(SPEC, *changes)


@pytest.mark.parametrize(
    ("labels", "loss", "metric"),
    [(5, "auto", "validation_top5"), (10, "auto", "validation_mean_average_precision"), (10, "bce", "validation_mae")],
)
def test_a_metric_that_no_validation_of_the_run_has_is_rejected(labels: int, loss: str, metric: str) -> None:
    model = f"model={{family: resnet, hidden_sizes: [64], depths: [1], num_labels: {labels}}}"
    stopping = f"training.early_stopping={{patience: 2, metric: {metric}}}"
    digits = "data={source: sklearn-digits}"
    changes = (model, digits, f"training.loss.name={loss}", stopping, f"checkpoint.keep_best={metric}")
    refused = {one.key: one.message for one in problems(SPEC, *changes)}
    assert refused.keys() == {"training.early_stopping.metric", "checkpoint.keep_best"}
    assert "Use validation_loss or validation_top1" in refused["training.early_stopping.metric"]
    load(SPEC, digits, model.replace(f": {labels}", ": 6"), "checkpoint.keep_best=validation_top5")


def test_a_warm_up_longer_than_the_training_is_rejected() -> None:
    changes = ("training.steps=null", "training.tokens=2000", "training.schedule.warmup_steps=9")
    assert "must not exceed 8 steps, derived from training.tokens." in problem(SPEC, *changes)
    changes = (*changes[:2], "training.schedule={name: wsd, warmup_steps: 4, cooldown_steps: 5}")
    assert "must not exceed 8 steps together with warmup_steps." in problem(SPEC, *changes)


def test_contradictions_are_reported_beside_invalid_sections() -> None:
    keys = {one.key for one in problems(SPEC + "checkpoint: {keep: x}\ncluster: {nodes: 2}\n")}
    assert keys == {"checkpoint.keep", "cluster.nodes"}


def test_a_secret_in_plain_text_is_rejected() -> None:
    assert "TOKEN is also in env, where its value is visible" in problem(
        SPEC + "env: {TOKEN: x}\nsecret_env: [TOKEN]\n"
    )


def test_long_values_are_shortened_in_messages() -> None:
    assert len(problem(SPEC, f"training.precision={'x' * 10_000}")) < 300
    assert "a number of more than 80 digits" in problem(SPEC, f"training.seed=0x{'f' * 6000}")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(bytes(range(256))), "it is not UTF-8 text"),
        (lambda path: path.write_text("a: 1\n" * 300_000), "is larger than 1 MB"),
    ],
    ids=["missing", "folder", "binary", "huge"],
)
def test_an_unreadable_file_is_named_with_a_remedy(  # type: ignore[no-untyped-def]
    make, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a message shows eighty characters of a path, and these may be long
    path = Path("run.yaml")
    make(path)
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_spec_is_frozen_and_rejects_unknown_keys() -> None:
    spec = load()
    with pytest.raises(ValueError, match="frozen"):
        spec.training.steps = 3  # type: ignore[misc]
    assert "unknown key" in problem(SPEC, "cluster.slurm.partitions=a")
    assert "unknown key" in problem(SPEC, "tracking.wandb.projekt=a")
