"""Files of the Hugging Face Hub by name: references (``hf://org/name``), the local cache, and requests to the hub.

Needs no torch. huggingface_hub is imported only when a request is sent; a complete cache needs no request.
"""
