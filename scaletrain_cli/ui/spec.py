"""The screen of `validate`: the resolved settings in a few lines."""

from rich.table import Table
from rich.text import Text

from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import ModelSpec, RunSpec
from scaletrain_cli.spec.data import NO_DATA
from scaletrain_cli.spec.preparation import PreparationStep
from scaletrain_cli.spec.vision_model import ClipSpec, LlavaSpec
from scaletrain_cli.text import bytes_text, count_text, seconds_text, whole_text
from scaletrain_cli.ui.console import escaped_text, plain, show, stdout_console


def show_summary(spec: RunSpec, file: str, *, usable: bool, epochs: Reason | None = None) -> None:
    """Print ``OK``, unless the spec is not usable, and a summary of the spec to stdout.

    ``epochs``: how ``training.epochs`` was counted in the steps of the spec.
    """
    console = stdout_console()
    verdict = ("OK ", "bold green") if usable else ("", "")
    console.print(Text.assemble(verdict, (plain(file), "bold")), soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=9)
    table.add_column(overflow="fold")
    for name, text in _rows(spec, epochs):
        table.add_row(f"  {name}", escaped_text(text))
    show(console, table)


def _rows(spec: RunSpec, epochs: Reason | None) -> list[tuple[str, str]]:
    cluster = spec.cluster
    if isinstance(cluster.gpu, str):
        device = "CPU process" if cluster.gpu == "cpu" else cluster.gpu
    else:
        device = f"{cluster.gpu.name} of {bytes_text(cluster.gpu.memory)}"
    ranks = f"{spec.world_size} × {device}"
    nodes = f" on {cluster.nodes} nodes" if cluster.nodes > 1 else ""
    spot = ", spot" if cluster.spot else ""
    rows = [
        ("name", spec.name),
        ("model", model_text(spec)),
        ("data", data_text(spec)),
        *_mixture_rows(spec),
        *(() if epochs is None else (("epochs", str(epochs)),)),
        ("training", training_text(spec)),
        ("layout", layout_text(spec)),
        ("cluster", f"{cluster.scheduler}, {ranks}{nodes}{spot}, {seconds_text(cluster.grace_seconds)} of grace"),
    ]
    if spec.env or spec.secret_env:
        rows.append(("env", ", ".join([*spec.env, *(f"{name} (secret)" for name in spec.secret_env)])))
    return rows


def model_text(spec: RunSpec) -> str:
    model = spec.model
    source = f"{model.family} ({model.preset})" if model.preset else model.family
    if isinstance(model, ClipSpec | LlavaSpec):
        size = model.vision_config.image_size
        images = f"{source}, images of {size} x {size}"
        if isinstance(model, ClipSpec):
            return images
        text = model.text_config
        layers = f"{text.num_hidden_layers} layers of {whole_text(text.hidden_size)}"
        return f"{images} as {whole_text(model.tokens_per_image)} tokens, language model of {layers}"
    if not isinstance(model, ModelSpec):
        return f"{source}, images of {model.image_size} x {model.image_size}, {whole_text(model.num_labels)} classes"
    heads = f"{model.num_attention_heads} heads"
    if model.num_key_value_heads != model.num_attention_heads:
        heads += f" ({model.num_key_value_heads} for keys and values)"
    experts = ""
    if model.num_experts:
        experts = f", {model.num_experts_per_tok} of {model.num_experts} experts, "
        experts += f"router balance loss {model.router_aux_loss_coef:g}"
    return (
        f"{source}, {model.num_hidden_layers} layers of {whole_text(model.hidden_size)}, {heads}{experts}, "
        f"vocabulary {whole_text(model.vocab_size)}, sequences of {whole_text(model.seq_len)} tokens"
    )


def data_text(spec: RunSpec) -> str:
    if spec.code.own_program and spec.data.source == NO_DATA:
        return "read by your program"
    source = spec.data.source or ", ".join(part.name for part in spec.data.sources)
    if spec.unit == "images":
        return source
    tokenizer = spec.data.tokenizer
    how = f"bpe, {whole_text(tokenizer.vocab_size)}" if tokenizer.kind == "bpe" else str(tokenizer.path)
    return f"{source}, tokenizer {how}"


def _mixture_rows(spec: RunSpec) -> list[tuple[str, str]]:
    """Return the later weights of the sources, and the steps of the preparation, each in a line."""
    rows = []
    if stages := spec.data.stages:
        shown = []
        for stage in stages:
            weights = ", ".join(f"{name} {weight:g}" for name, weight in stage.weights.items())
            shown.append(f"from step {whole_text(stage.first_step(spec.total_steps))} on: {weights}")
        rows.append(("stages", "; ".join(shown)))
    if steps := spec.data.prepare:
        rows.append(("prepare", ", ".join(map(_step_text, steps))))
    return rows


def _step_text(step: PreparationStep) -> str:
    """Return a step of data.prepare as a few words: its name, its rules, and the sources that it is limited to."""
    settings = step.model_dump(mode="json")
    name = settings.get("rules", settings["step"])
    return name if step.only is None else f"{name} ({', '.join(step.only)})"


def training_text(spec: RunSpec) -> str:
    training = spec.training
    batch = f"{whole_text(training.global_batch_size)} {spec.samples}"
    if training.epochs is not None:
        length = f"{training.epochs:g} {'epoch' if training.epochs == 1 else 'epochs'} in steps of {batch}"
    else:
        seen = spec.total_steps * training.global_batch_size * spec.units_per_sample
        length = f"{whole_text(spec.total_steps)} steps of {batch}, {count_text(seen)} {spec.unit}"
    return (
        f"{length}, {training.precision}, {training.optimizer.name} "
        f"at {training.optimizer.lr:g} with weight decay {training.optimizer.weight_decay:g}, "
        f"{training.schedule.name} schedule"
    )


def layout_text(spec: RunSpec) -> str:
    """Return the pinned keys of the layout."""
    usual = type(spec.layout)()
    pinned = [
        f"{name} {value}"
        for name, value in ((name, getattr(spec.layout, name)) for name in type(spec.layout).model_fields)
        if value != getattr(usual, name)
    ]
    return f"{', '.join(pinned)}; the planner chooses the rest" if pinned else "chosen by the planner"
