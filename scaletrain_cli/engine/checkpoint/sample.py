"""The command ``sample``: what transformers generates with an exported checkpoint."""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scaletrain_cli.data.tokenizers.files import without_end
from scaletrain_cli.engine.data.chat_template import SpecialTokens, compile_template
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason


@torch.no_grad()
def run_command(arguments: Sequence[str]) -> dict[str, Any]:
    """Return an answer to each prompt, given FOLDER REQUEST: the exported folder, and a JSON file.

    The file has ``prompts``, ``system``, ``raw``, ``variables`` and ``date`` of the chat template, ``max_tokens``,
    ``temperature`` and ``seed``. Each prompt is answered as if it were the only one. Raises UsageError.
    """
    logging.disable(logging.WARNING)  # torchao warns of kernels for other GPUs when transformers imports it
    try:
        return _sampled(arguments)
    finally:
        logging.disable(logging.NOTSET)


def _sampled(arguments: Sequence[str]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    folder, request = arguments[0], json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not request["raw"] and tokenizer.chat_template is None:
        raise UsageError(Reason("engine.sample-without-template"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.to(device).eval()
    # The tokens that end a generation, as transformers takes them.
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    stops = ends if isinstance(ends, list) else [] if ends is None else [ends]
    longest = getattr(model.config, "max_position_embeddings", None)
    answers = []
    for prompt in request["prompts"]:
        ids = _encoded(tokenizer, prompt, request, stops)
        room = request["max_tokens"] if longest is None else min(request["max_tokens"], longest - len(ids))
        if room < 1:
            raise UsageError(Reason("engine.sample-prompt-too-long", {"tokens": len(ids), "longest": longest}))
        print(f"generating up to {room} tokens after {len(ids)} on {device.type}", file=sys.stderr, flush=True)
        torch.manual_seed(request["seed"])
        tokens = torch.tensor([ids], device=device)
        sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if request["temperature"] > 0:
            sampling = {"do_sample": True, "temperature": request["temperature"], "top_p": 1.0, "top_k": 0}
        whole = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=room,
            pad_token_id=stops[0] if stops else None,
            **sampling,
        )
        answer = whole[0, len(ids) :].tolist()
        stopped = bool(answer) and answer[-1] in stops
        text = tokenizer.decode(answer[:-1] if stopped else answer, skip_special_tokens=False)
        answers.append(
            {"prompt": prompt, "text": text, "prompt_tokens": len(ids), "tokens": len(answer), "stopped": stopped}
        )
    return {"answers": answers, "chat": not request["raw"]}


def _encoded(tokenizer: Any, prompt: str, request: dict[str, Any], stops: list[int]) -> list[int]:
    if request["raw"]:
        return without_end(tokenizer(prompt)["input_ids"], stops)
    system = [] if request["system"] is None else [{"role": "system", "content": request["system"]}]
    messages = [*system, {"role": "user", "content": prompt}]
    tokens = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    source = tokenizer.get_chat_template()  # of several that for conversations without tools
    template = compile_template(source, SpecialTokens(tokens), request["date"], request["variables"])
    text = template.render(messages, None, prompt=True).text
    rendered: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return rendered
