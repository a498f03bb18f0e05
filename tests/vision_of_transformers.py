"""Networks for images as transformers has them, from the dimensions of a spec."""

from typing import Any


def class_and_config(spec: Any) -> tuple[Any, Any]:
    """Return the class and the config; the text tower of a CLIP begins and is padded with its first tokens."""
    import transformers

    from scaletrain_cli.spec.hugging_face_weights import to_hugging_face

    if spec.family == "llava":
        return transformers.LlavaForConditionalGeneration, transformers.LlavaConfig(**to_hugging_face(spec))
    given = spec.model_dump(exclude={"family", "preset", "memory_format"})
    if spec.family == "convnext":
        given["num_stages"] = len(spec.depths)
    if spec.family == "clip":
        given["text_config"] |= {"bos_token_id": 0, "pad_token_id": 1}
        for tower in ("vision_config", "text_config"):
            given[tower]["projection_dim"] = spec.projection_dim
        return transformers.CLIPModel, transformers.CLIPConfig(**given)
    name = {"resnet": "ResNet", "convnext": "ConvNext", "vit": "ViT"}[spec.family]
    return getattr(transformers, f"{name}ForImageClassification"), getattr(transformers, f"{name}Config")(**given)
