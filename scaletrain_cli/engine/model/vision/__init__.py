"""Networks for images, under Hugging Face parameter names."""
