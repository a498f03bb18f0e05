"""Checks of the training recipe. The texts follow a topic and its value."""

from scaletrain_cli.reasons import Texts

TEXTS: Texts = {
    "router-balance": "model.router_aux_loss_coef, which a config.json sets if it states one",
    "router-balance-none": "nothing keeps the loads of the experts even: set model.router_aux_loss_coef, or with "
    "topk_method: noaux_tc model.bias_update_speed",
    "router-balance-large": "published models train with 0.0001 (DeepSeek-V3, arXiv:2412.19437) to 0.02 (Mixtral "
    "8x7B); with this coefficient even loads may count more than the task. A config.json that states it gives it here "
    "and in TRL; transformers alone adds no such loss unless output_router_logits is set. Set "
    "model.router_aux_loss_coef",
    "effective-batch": "micro-batch {micro_batch} x accumulation {accumulation} x {data} data-parallel ranks",
    "critical-batch": "with {tokens:.3g} tokens per step, training needs about {times:.2g} times the tokens that "
    "small batches need (arXiv:1812.06162, arXiv:2001.08361; an order of magnitude)",
    "no-recipe-linear": "no published recipe for {model} to compare with; if you multiply the batch size by k, "
    "multiply the learning rate by k too, which is shown for k up to 32 (arXiv:1706.02677)",
    "no-recipe-square-root": "no published recipe for {model} to compare with; if you multiply the batch size by k, "
    "multiply the learning rate by the square root of k (arXiv:2205.10287)",
    "recipe-of-another-optimizer": "the recipe uses {optimizer}, with {lr:g} at {batch:whole} {unit} ({source})",
    "beyond-linear-scaling": "linear scaling is shown up to a batch {limit:.0f} times as large (arXiv:1706.02677); "
    "this one is {ratio:.3g} times the recipe's, {lr:g} at {batch:whole} {unit} ({source}). Try lower rates first",
    "recipe-rate": "the recipe scales to {suggested:.2g}: {lr:g} at {batch:whole} {unit} ({source})",
    "recipe-rate-linear": "the recipe scales to {suggested:.2g}: linearly with a batch {ratio:.3g} times as large "
    "(arXiv:1706.02677), from {lr:g} at {batch:whole} {unit} ({source})",
    "recipe-rate-square-root": "the recipe scales to {suggested:.2g}: with the square root of a batch {ratio:.3g} "
    "times as large (arXiv:2205.10287, which also scales 1 - beta by {ratio:.3g} and eps by {eps_ratio:.2g}), from "
    "{lr:g} at {batch:whole} {unit} ({source})",
    "fine-tuning-sgd": "fine-tuning from given weights usually takes about {usual:g} with Adam (TRL's default); for "
    "SGD there is no usual value",
    "fine-tuning-rate": "fine-tuning from given weights usually takes about {usual:g} with Adam at this size (2e-5: "
    "TRL's default and Zephyr; 5e-6 for 8 B parameters and 2e-6 for 70 B: Tulu 3, arXiv:2411.15124)",
    "fine-tuning-rate-high": "fine-tuning from given weights usually takes about {usual:g} with Adam at this size "
    "(2e-5: TRL's default and Zephyr; 5e-6 for 8 B parameters and 2e-6 for 70 B: Tulu 3, arXiv:2411.15124); this one "
    "is of the order of pre-training, and may undo what the weights have learned",
    "adapter-rate": "published LoRA runs of this size used about {usual:g} (QLoRA, arXiv:2305.14314); the best rate "
    "is about ten times that of full fine-tuning (LoRA Without Regret, Thinking Machines Lab, 2025)",
    "adapter-rate-low": "published LoRA runs of this size used about {usual:g} (QLoRA, arXiv:2305.14314); the best "
    "rate is about ten times that of full fine-tuning (LoRA Without Regret, Thinking Machines Lab, 2025), and this "
    "one is probably too low for an adapter",
    "adapter-rate-high": "published LoRA runs of this size used about {usual:g} (QLoRA, arXiv:2305.14314); this one "
    "may diverge",
    "preference-rate": "DPO usually uses about {usual:g} at this size: published runs without adapters 5e-7 for 7 B "
    "and 8 B parameters (Zephyr, arXiv:2310.16944; Tulu 3, arXiv:2411.15124), 2e-7 for 70 B (Tulu 3); with an adapter "
    "about ten times as much",
    "preference-rate-high": "DPO usually uses about {usual:g} at this size: published runs without adapters 5e-7 for "
    "7 B and 8 B parameters (Zephyr, arXiv:2310.16944; Tulu 3, arXiv:2411.15124), 2e-7 for 70 B (Tulu 3); with an "
    "adapter about ten times as much. At this one the model may degenerate, because preferences alone do not keep it "
    "near its start",
    "trained-parameters": "the others are frozen, and have no gradients and no optimizer states",
    "adapter-without-mlp": "adapters on attention alone learn less than on all linear layers, also with a higher rank "
    "(QLoRA, arXiv:2305.14314, figure 2; LoRA Without Regret, Thinking Machines Lab, 2025)",
    "usual-epochs": "published recipes read instructions 1 to 4 times (alignment-handbook's recipe for Zephyr 1, Tulu "
    "3 2, TRL and LLaMA-Factory 3, Axolotl 4)",
    "part-of-the-data": "the run reads a part of the data",
    "epochs-many": "published recipes read instructions 1 to 4 times (alignment-handbook's recipe for Zephyr 1, Tulu "
    "3 2, TRL and LLaMA-Factory 3, Axolotl 4); more epochs memorize the rows. Watch the validation loss, or set "
    "checkpoint.keep_best",
    "preference-epochs": "published DPO runs read the pairs once (alignment-handbook's recipe for Zephyr, Tulu 3) to "
    "three times (OLMo 7B Instruct)",
    "preference-epochs-many": "published DPO runs read the pairs once (alignment-handbook's recipe for Zephyr, Tulu "
    "3) to three times (OLMo 7B Instruct); more epochs overfit. Watch the validation loss, or set checkpoint.keep_best",
    "repeated-text": "repeated text is almost as good as new text up to 4 epochs (arXiv:2305.16264)",
    "repeated-text-many": "repeated text is almost as good as new text up to 4 epochs, and much less beyond "
    "(arXiv:2305.16264)",
    "fine-tuning-batch": "published runs of full fine-tuning have about 128 samples (Tulu 3, alignment-handbook's "
    "recipe for Zephyr)",
    "fine-tuning-batch-large": "published runs of full fine-tuning have about 128 samples (Tulu 3, "
    "alignment-handbook's recipe for Zephyr); so large a batch leaves few updates",
    "fine-tuning-batch-small": "published runs of full fine-tuning have about 128 samples (Tulu 3, "
    "alignment-handbook's recipe for Zephyr); the gradient of so small a batch is noisy, and needs a lower learning "
    "rate",
    "preference-batch": "published runs of DPO have about 128 pairs (Tulu 3, alignment-handbook's recipe for Zephyr)",
    "preference-batch-large": "published runs of DPO have about 128 pairs (Tulu 3, alignment-handbook's recipe for "
    "Zephyr); so large a batch leaves few updates",
    "preference-batch-small": "published runs of DPO have about 128 pairs (Tulu 3, alignment-handbook's recipe for "
    "Zephyr); the gradient of so small a batch is noisy, and needs a lower learning rate",
    "adapter-batch": "published LoRA runs have 8 to 32 samples (QLoRA 16, Axolotl and LLaMA-Factory 8)",
    "adapter-batch-large": "published LoRA runs have 8 to 32 samples (QLoRA 16, Axolotl and LLaMA-Factory 8); large "
    "batches hurt an adapter more than full fine-tuning, whatever its rank (LoRA Without Regret, Thinking Machines "
    "Lab, 2025)",
    "fine-tuning-decay-high": "published fine-tuning takes 0 (Tulu 3, Zephyr, QLoRA, Axolotl) to 0.1 (Llama 2 chat, "
    "arXiv:2307.09288)",
    "adapter-scale": "published runs have 0.06 to 2 (QLoRA 16 / 64, Axolotl 16 / 32, PEFT 8 / 8, LLaMA-Factory 16 / "
    "8); it multiplies the learning rate of the adapter",
    "adapter-scale-unusual": "published runs have 0.06 to 2 (QLoRA 16 / 64, Axolotl 16 / 32, PEFT 8 / 8, "
    "LLaMA-Factory 16 / 8); it multiplies the learning rate of the adapter, so this one is probably a mistake",
    "adapter-rank": "{parameters:count} parameters for {tokens:count} tokens: enough, at about 2 bits per parameter "
    "(arXiv:2404.05405) and one bit per token",
    "adapter-rank-highest": "{parameters:count} parameters for {tokens:count} tokens: at about 2 bits per parameter "
    "(arXiv:2404.05405) and one bit per token the adapter cannot hold the data, and falls behind full fine-tuning "
    "(LoRA Without Regret, Thinking Machines Lab, 2025)",
    "adapter-rank-low": "{parameters:count} parameters for {tokens:count} tokens: at about 2 bits per parameter "
    "(arXiv:2404.05405) and one bit per token the adapter cannot hold the data, and falls behind full fine-tuning "
    "(LoRA Without Regret, Thinking Machines Lab, 2025); a rank of {enough} can hold more",
    "no-warm-up": "large batches and Adam's first steps need a warm-up (arXiv:1706.02677, arXiv:1908.03265)",
    "warm-up-most-of-the-run": "the learning rate rises for most of the run",
    "long-warm-up": "long: published recipes take from 0.1 % to 11 % of the steps",
    "usual-warm-up": "as in published recipes, which take from 0.1 % to 11 % of the steps",
    "tokens-per-parameter": "{tokens:count} tokens for {parameters:count} active parameters; about {optimal} is "
    "compute-optimal (arXiv:2203.15556)",
    "large-validation-split": "reserves about {held:count} tokens of a corpus that is read once; one evaluation reads "
    "{read:count}. data.validation_split: {enough:g} is enough",
    "total-flops": "{petaflop_days:.3g} PFLOP/s-days, forward and backward, without recomputation",
    "precision-emulated": "{device} has no {precision} units and emulates it slowly. It has {known}",
    "loss-scaling": "needs loss scaling (arXiv:1710.03740); steps whose gradients overflow are skipped",
    "loss-scaling-or-bf16": "needs loss scaling (arXiv:1710.03740); steps whose gradients overflow are skipped. "
    "{device} has bf16, which needs none",
    "bf16-is-faster": "bf16 has {ratio:.3g} times the peak rate on {device}",
    "precision-supported": "{device} has units for it",
    "whole-tiles": "tensor cores compute only full tiles",
    "padded-tiles": "not a multiple of {tile}, so tensor cores also compute padding: {widths}",
    "padded-tiles-and-vocabulary": "not a multiple of {tile}, so tensor cores also compute padding: {widths}. A "
    "vocab_size of {padded:whole} would be a multiple",
}
