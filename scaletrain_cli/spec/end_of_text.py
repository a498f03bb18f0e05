"""The tokens that end a document, by the names that published tokenizers give them, in order of preference."""

END_OF_TEXT = "<|endoftext|>"
# GPT-2, Llama 3, Llama 2 and Mistral, Qwen, Gemma.
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>")
