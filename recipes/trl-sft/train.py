"""Fine-tuning with TRL's SFTTrainer under ScaleTrain. The numbered comments mark the five lines that it needs.

Each rank runs ``python -m train RUN_DIR``. The model, the tokenizer and the data are made here, so that the example
needs no network: replace them with ``from_pretrained`` and a data set of yours.
"""

import random

# 1. Import the callback.
from scaletrain_cli.worker.hugging_face import ScaletrainCallback

# 2. Handle the signals before torch is imported, so that no preemption notice is lost.
scaletrain = ScaletrainCallback.start()

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

# 3. The run spec: train as many steps, with the batch and the seed that were planned.
SPEC = scaletrain.rank.resolved.spec
TRAINING, WORLD = SPEC["training"], scaletrain.rank.environment.world_size
PER_RANK = TRAINING["global_batch_size"] // WORLD
CHAT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


def conversations(count: int, seed: int) -> Dataset:
    """Return short sums as conversations, such as "3 + 4" and "7"."""
    numbers = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = numbers.randrange(50), numbers.randrange(50)
        rows.append({"prompt": [{"role": "user", "content": f"{a} + {b}"}]})
        rows[-1]["completion"] = [{"role": "assistant", "content": str(a + b)}]
    return Dataset.from_list(rows)


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single characters, with a chat template."""
    marks = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.train_from_iterator(["0123456789 +"], trainers.BpeTrainer(vocab_size=64, special_tokens=marks))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")
    fast.chat_template = CHAT
    return fast


def small_model(vocab_size: int) -> LlamaForCausalLM:
    """Return the model of the run spec with random weights."""
    sizes = SPEC["model"]
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    torch.manual_seed(TRAINING["seed"])
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **{key: sizes[key] for key in keys}))


if __name__ == "__main__":
    tokenizer = small_tokenizer()
    arguments = SFTConfig(
        output_dir=str(scaletrain.rank.environment.run.path / "model"),  # checkpoints go to the folder of the run
        max_steps=scaletrain.rank.resolved.total_steps,
        per_device_train_batch_size=PER_RANK,
        learning_rate=TRAINING["optimizer"]["lr"],
        seed=TRAINING["seed"],
        max_length=SPEC["model"]["seq_len"],
        logging_steps=1,
        save_strategy="no",  # checkpoint.every of the run spec decides
        report_to="none",  # tracking of the run spec decides
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
    )
    trainer = SFTTrainer(
        model=small_model(len(tokenizer)),
        args=arguments,
        train_dataset=conversations(400, TRAINING["seed"]),
        processing_class=tokenizer,
        callbacks=[scaletrain],  # 4. Heartbeat, checkpoints, metrics and events.
    )
    scaletrain.run(trainer)  # 5. Resume, train, and exit with the code that the launcher expects.
