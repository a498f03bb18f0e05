"""Continue a text with an exported model: ``python docs/first_run_generate.py MODEL_FOLDER TEXT``."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

folder, text = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
set_seed(1)
tokens = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=32, do_sample=True, top_k=20)
print(tokenizer.decode(tokens[0]))
