"""Checks of the recipe of a run that starts from weights: learning rate, epochs, batch, weight decay and adapter.

The figures are those of runs and examples that others published: Tulu 3 (arXiv:2411.15124; allenai/open-instruct,
docs/tulu3.md), Zephyr (rates: arXiv:2310.16944; batches and epochs, which differ there: alignment-handbook's recipe,
huggingface/alignment-handbook, recipes/zephyr-7b-beta), QLoRA (arXiv:2305.14314; artidoro/qlora, scripts), the defaults
of TRL, and the Llama 3 examples of Axolotl (examples/llama-3/lora-8b.yml) and LLaMA-Factory
(examples/train_lora/llama3_lora_sft.yaml).
"""

from collections.abc import Iterator

from scaletrain_cli.plan.data_size import data_size
from scaletrain_cli.plan.result import ModelSize, Sanity
from scaletrain_cli.plan.workloads.registry import workload_of
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec

# Learning rates of large models are lower in Tulu 3 and QLoRA; "large" begins between their 13B and 33B.
_LARGE_PARAMETERS = 30e9
# Full fine-tuning of language models: TRL's default and Zephyr are 2e-5; Tulu 3 took 5e-6 for 8B and 2e-6 for 70B. Ten
# times the highest is of the order of pre-training (Llama 2 7B: 3e-4, 70B: 1.5e-4, arXiv:2307.09288).
_RATE, _LARGE_RATE = 2e-5, 2e-6
_PRE_TRAINING_RATE, _LARGE_PRE_TRAINING_RATE = 2e-4, 1e-4
# LoRA: QLoRA (table 9) took 2e-4 up to 13B and 1e-4 for 33B and 65B. About ten times the rate of full fine-tuning is
# best for an adapter (Schulman et al., LoRA Without Regret, Thinking Machines Lab, 2025).
_ADAPTER_RATE, _LARGE_ADAPTER_RATE = 2e-4, 1e-4
_LOW_ADAPTER_RATE, _HIGH_ADAPTER_RATE = 2e-5, 2e-3
# DPO: Zephyr 7B and Tulu 3 8B took 5e-7, Tulu 3 70B and 405B 2e-7; the authors (arXiv:2305.18290) 1e-6. With an adapter
# about ten times as much.
_PREFERENCE_RATE, _LARGE_PREFERENCE_RATE = 5e-7, 2e-7
_HIGH_PREFERENCE_RATE, _LARGE_HIGH_PREFERENCE_RATE = 5e-6, 2e-6
# Epochs: alignment-handbook's recipe for Zephyr 1, Tulu 3 2, TRL's and LLaMA-Factory's defaults 3, Axolotl's example 4;
# of DPO the recipe for Zephyr and Tulu 3 1, Zephyr itself up to 3 (arXiv:2310.16944),
# OLMo 7B Instruct 3 (its model card). Repeated text is almost as good as new up to 4 epochs (arXiv:2305.16264).
# By objective: the code for a usual number, that for more, and the most that is usual.
_EPOCHS = {
    "sft": ("plan.usual-epochs", "plan.epochs-many", 5.0),
    "dpo": ("plan.preference-epochs", "plan.preference-epochs-many", 3.0),
    "causal_lm": ("plan.repeated-text", "plan.repeated-text-many", 4.0),
}
_FEWEST_EPOCHS = 0.5  # below, the run reads a part of the data, and published numbers of epochs say nothing
# Samples per batch: Tulu 3 and alignment-handbook's recipe for Zephyr 128, for both objectives. With LoRA, QLoRA 16,
# Axolotl and LLaMA-Factory 8, and below 32 is recommended, because large batches hurt more (LoRA Without Regret). A
# note begins at several times these.
_MOST_SAMPLES, _MOST_SAMPLES_OF_ADAPTER, _FEWEST_SAMPLES = 1024, 128, 8
# Weight decay: Tulu 3, Zephyr, QLoRA and Axolotl 0, torchtune 0.01, Llama 2 chat 0.1.
_MOST_DECAY = 0.1
# alpha / rank: QLoRA 16 / 64, Axolotl 16 / 32, PEFT 8 / 8, LLaMA-Factory and torchtune 2; 16 / 256 in TRL's guide to
# LoRA Without Regret.
_LEAST_SCALE, _MOST_SCALE = 1 / 32, 8.0
# A language model stores about 2 bits per parameter (arXiv:2404.05405); at a loss of 0.7 nats a token has one bit.
_BITS_PER_PARAMETER, _BITS_PER_TOKEN = 2.0, 1.0
_HIGHEST_RANK = 256  # that is advised, as in TRL's guide to LoRA Without Regret
_SGD = ("sgd", "momentum")
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "c_attn"}


def check_fine_tuning(spec: RunSpec, size: ModelSize) -> Iterator[Sanity]:
    """Yield the checks of a language model that starts from weights, without its learning rate."""
    yield from _epochs(spec)
    if not starts_from_weights(spec):
        return
    yield from _batch(spec)
    decay = spec.training.optimizer.weight_decay
    if decay > _MOST_DECAY:
        yield Sanity("weight decay", f"{decay:g}", "note", Reason("plan.fine-tuning-decay-high"))
    yield from _adapter(spec, size)


def starts_from_weights(spec: RunSpec) -> bool:
    """Return whether the run is compared with fine-tuning instead of pre-training."""
    return spec.language_weights is not None


def check_rate(spec: RunSpec) -> Sanity:
    """Return the learning rate compared with published ones for the objective, the method and the size."""
    rate, large = spec.training.optimizer.lr, workload_of(spec.model).parameter_count(spec.model) > _LARGE_PARAMETERS
    usual = {"usual": _LARGE_RATE if large else _RATE}
    if spec.training.optimizer.name in _SGD:
        return Sanity("learning rate", f"{rate:g}", "note", Reason("plan.fine-tuning-sgd", usual))
    with_adapter = getattr(spec.model, "adapter", None) is not None
    if spec.training.objective == "dpo":
        times = 10 if with_adapter else 1
        most = _LARGE_HIGH_PREFERENCE_RATE if large else _HIGH_PREFERENCE_RATE
        high = rate > times * most
        usual = {"usual": times * (_LARGE_PREFERENCE_RATE if large else _PREFERENCE_RATE)}
        reason = Reason("plan.preference-rate-high" if high else "plan.preference-rate", usual)
        return Sanity("learning rate", f"{rate:g}", "note" if high else "ok", reason)
    if with_adapter:
        usual = {"usual": _LARGE_ADAPTER_RATE if large else _ADAPTER_RATE}
        if rate < _LOW_ADAPTER_RATE:
            return Sanity("learning rate", f"{rate:g}", "note", Reason("plan.adapter-rate-low", usual))
        if rate > _HIGH_ADAPTER_RATE:
            return Sanity("learning rate", f"{rate:g}", "note", Reason("plan.adapter-rate-high", usual))
        return Sanity("learning rate", f"{rate:g}", "ok", Reason("plan.adapter-rate", usual))
    if rate < (_LARGE_PRE_TRAINING_RATE if large else _PRE_TRAINING_RATE):
        return Sanity("learning rate", f"{rate:g}", "ok", Reason("plan.fine-tuning-rate", usual))
    return Sanity("learning rate", f"{rate:g}", "note", Reason("plan.fine-tuning-rate-high", usual))


def check_what_trains(spec: RunSpec, size: ModelSize) -> Iterator[Sanity]:
    """Yield the share of the parameters that trains, and a note if an adapter leaves the MLPs out."""
    if not size.trainable_parameters or size.trainable_parameters == size.parameters:
        return
    share = size.trainable_parameters / size.parameters
    value = f"{size.trainable_parameters:,}, {100 * share:.2g} % of {size.parameters:,}"
    adapter = getattr(spec.model, "adapter", None)
    if adapter is not None and set(adapter.targets) <= _ATTENTION:
        yield Sanity("trained parameters", value, "note", Reason("plan.adapter-without-mlp"))
    else:
        yield Sanity("trained parameters", value, "ok", Reason("plan.trained-parameters"))


def _epochs(spec: RunSpec) -> Iterator[Sanity]:
    """Yield the number of epochs, where the size of the data is known here."""
    known, objective = data_size(spec), spec.training.objective
    if known is None or not known.train:
        return
    epochs = spec.total_steps * spec.training.global_batch_size / known.train
    counted = "" if known.exact else "about "
    figure = f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"  # not 3e+02
    value = f"{counted}{figure} over {counted}{known.train:,} {spec.samples}"
    if known.rows:
        value += f" of {spec.transformer.seq_len:,} tokens with {known.rows:,} rows"
    usual, many, most = _EPOCHS[objective]
    above = epochs > most
    if epochs < _FEWEST_EPOCHS:
        usual = "plan.part-of-the-data"
    yield Sanity("epochs", value, "note" if above else "ok", Reason(many if above else usual))


def _batch(spec: RunSpec) -> Iterator[Sanity]:
    """Yield the samples per batch; a packed sequence counts as at least one."""
    samples, objective = spec.training.global_batch_size, spec.training.objective
    if objective == "causal_lm":
        return
    value = f"{samples:,} {spec.samples}"
    pairs = objective == "dpo"
    if getattr(spec.model, "adapter", None) is not None and objective == "sft":
        large = samples > _MOST_SAMPLES_OF_ADAPTER
        code = "plan.adapter-batch-large" if large else "plan.adapter-batch"
        yield Sanity("fine-tuning batch", value, "note" if large else "ok", Reason(code))
    elif samples > _MOST_SAMPLES:
        code = "plan.preference-batch-large" if pairs else "plan.fine-tuning-batch-large"
        yield Sanity("fine-tuning batch", value, "note", Reason(code))
    elif samples < _FEWEST_SAMPLES and spec.data.packing == "none":
        code = "plan.preference-batch-small" if pairs else "plan.fine-tuning-batch-small"
        yield Sanity("fine-tuning batch", value, "note", Reason(code))
    else:
        code = "plan.preference-batch" if pairs else "plan.fine-tuning-batch"
        yield Sanity("fine-tuning batch", value, "ok", Reason(code))


def _adapter(spec: RunSpec, size: ModelSize) -> Iterator[Sanity]:
    """Yield the scale of an adapter, and what it can store compared with what the data have."""
    adapter = getattr(spec.model, "adapter", None)
    if adapter is None:
        return
    scale = adapter.alpha / adapter.rank
    if not adapter.rslora:
        value = f"alpha / rank = {adapter.alpha:g} / {adapter.rank}"
        usual = _LEAST_SCALE <= scale <= _MOST_SCALE
        code = "plan.adapter-scale" if usual else "plan.adapter-scale-unusual"
        yield Sanity("adapter scale", value, "ok" if usual else "note", Reason(code))
    known = data_size(spec)
    if known is None or spec.training.objective == "dpo":  # a pair has one bit: which answer is preferred
        return
    stored, held = _BITS_PER_PARAMETER * size.trainable_parameters, _BITS_PER_TOKEN * known.tokens
    tokens = {"tokens": known.tokens, "parameters": size.trainable_parameters}
    if held > 2 * stored:
        enough = 2 ** max(0, round(adapter.rank * held / stored) - 1).bit_length()
        enough = min(enough, _HIGHEST_RANK)
        more = Reason("plan.adapter-rank-low", {**tokens, "enough": enough})
        most = Reason("plan.adapter-rank-highest", tokens)
        yield Sanity("adapter rank", f"{adapter.rank}", "note", more if enough > adapter.rank else most)
    else:
        yield Sanity("adapter rank", f"{adapter.rank}", "ok", Reason("plan.adapter-rank", tokens))
