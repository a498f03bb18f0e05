"""Sections of ``data`` for images: where their labels and captions are, how they are decoded, and augmentations."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from scaletrain_cli.spec.quantities import NonNegative, Positive, Share, SomeShare, Text, not_a_switch, valid_if
from scaletrain_cli.spec.section import LEFT_OUT, Section, used_when, where, where_not

Color = Annotated[tuple[NonNegative, ...], Field(min_length=1, max_length=4)]


Range = Annotated[
    tuple[Positive, Positive],
    AfterValidator(valid_if(lambda value: value[0] <= value[1], "must be a range: the smaller number first")),
]
AreaRange = Annotated[
    Range, AfterValidator(valid_if(lambda value: value[1] <= 1, "must not exceed 1, the whole area of the image"))
]
_WITHOUT_ROWS = used_when(where_not("model.family", "llava"))
_WITH_ROWS = used_when(where("model.family", "llava"))
_WITH_CLASSES = used_when(where("training.objective", "classification"))
_WITH_LABELS = used_when(where("training.objective", "classification", "regression"))
_WITH_CAPTIONS = used_when(where("model.family", "clip"))


class ImageFieldsSpec(Section):
    """Columns of parquet files, or suffixes of the members of a tar shard, with the parts of a sample."""

    image: Text = Field(default="auto", description="auto: jpg, jpeg, png or webp in tar shards; image in parquet")
    label: Annotated[Text, _WITH_LABELS] = Field(
        default="auto", description="auto: cls in tar shards, label in parquet, or the folder"
    )
    caption: Annotated[Text, _WITH_CAPTIONS] = Field(
        default="auto",
        description="auto: txt in tar shards, caption or text in parquet; json:KEY: a key of a JSON member",
    )


class RandomResizedCropSpec(Section):
    """A random part of the image, resized to the size of the model (arXiv:1409.4842, section 6)."""

    scale: AreaRange = Field(default=(0.08, 1.0), description="share of the area of the image")
    ratio: Range = Field(default=(0.75, 4 / 3), description="width over height, uniform in its logarithm")


class ColorJitterSpec(Section):
    """Brightness, contrast and saturation times 1 +- these, and a hue shifted by up to this share of the circle."""

    brightness: NonNegative = 0.0
    contrast: NonNegative = 0.0
    saturation: NonNegative = 0.0
    hue: Annotated[float, BeforeValidator(not_a_switch), Field(ge=0, le=0.5)] = 0.0


class RandAugmentSpec(Section):
    """RandAugment (arXiv:1909.13719): operations drawn from 15, with a common magnitude from 0 to 10."""

    num_ops: Annotated[int, Field(strict=True, ge=1, le=16)] = Field(default=2, description="operations per image")
    magnitude: Annotated[float, BeforeValidator(not_a_switch), Field(ge=0, le=10)] = 9.0
    magnitude_std: NonNegative = Field(default=0.5, description="standard deviation of the magnitude of an operation")
    probability: Share = Field(default=0.5, description="of each operation")
    increasing: bool = Field(default=True, description="a larger magnitude always changes the image more")


class RandomErasingSpec(Section):
    """A rectangle is replaced by the mean of the dataset (arXiv:1708.04896)."""

    probability: Share = 0.25
    scale: AreaRange = Field(default=(0.02, 1 / 3), description="share of the area of the image")
    ratio: Range = Field(default=(0.3, 1 / 0.3), description="height over width, uniform in its logarithm")


_MIXES = used_when(where_not("data.images.augment.mixes", False, setting="data.images.augment.mixup"))


class AugmentSpec(Section):
    """Random changes of training images. Each is a function of seed, epoch and sample, whatever reads them."""

    random_resized_crop: RandomResizedCropSpec | None = Field(
        default=RandomResizedCropSpec(),
        description="null: the image as in evaluation, resized and cropped at its center",
    )
    horizontal_flip: Share = 0.5
    color_jitter: ColorJitterSpec | None = None
    rand_augment: RandAugmentSpec | None = None
    random_erasing: RandomErasingSpec | None = None
    mixup: NonNegative = Field(default=0.0, description="alpha of mixup (arXiv:1710.09412); 0: none")
    cutmix: NonNegative = Field(default=0.0, description="alpha of CutMix (arXiv:1905.04899); 0: none")
    mix_probability: Annotated[Share, _MIXES] = Field(default=1.0, description="of mixing a pair of images")
    switch_probability: Annotated[Share, _MIXES] = Field(
        default=0.5, description="of CutMix, where both alphas are above 0"
    )

    @property
    def mixes(self) -> bool:
        """Return True if images are mixed with each other."""
        return self.mixup > 0 or self.cutmix > 0


class ImagesSpec(Section):
    """Images of training: their fields, normalization, size in evaluation, decoder and augmentation."""

    folder: Annotated[Text | None, _WITH_ROWS] = Field(
        default=None, description="llava: folder of the images that rows name; null: the folder of the file of rows"
    )
    fields: Annotated[ImageFieldsSpec, _WITHOUT_ROWS] = LEFT_OUT
    classes: Annotated[Text | None, _WITH_CLASSES] = Field(
        default=None, description="file with a class name per line, in the order of the labels; null: sorted folders"
    )
    mean: Color | None = Field(
        default=None, description="of each channel, from 0 to 1; null: that of the family, 0.5 without RGB"
    )
    std: Color | None = Field(default=None, description="of each channel; null: that of the family, 0.5 without RGB")
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    crop_ratio: Annotated[SomeShare, _WITHOUT_ROWS] = Field(
        default=0.875, description="evaluation: share of the resized image that is cropped at its center"
    )
    aspect: Annotated[Literal["crop", "pad"], _WITH_ROWS] = Field(
        default="crop",
        description="llava: crop: the center, as wide as the shorter side; pad: the whole image, with the mean color "
        "around it up to a square (LLaVA-1.5)",
    )
    decoder: Literal["auto", "pillow", "torchvision"] = Field(
        default="auto", description="auto: pillow, whose pixels do not depend on the installation"
    )
    augment: Annotated[AugmentSpec, _WITHOUT_ROWS] = LEFT_OUT

    def normalization(self, family: str, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation of each channel, for a family of networks."""
        mean, std = NORMALIZATION[family] if channels == 3 else ((0.5,) * channels, (0.5,) * channels)
        return self.mean or mean, self.std or std

    def crop_ratio_of(self, family: str) -> float:
        """Return ``crop_ratio``, which a LLaVA does not have: its crop is as wide as the shorter side."""
        return 1.0 if family == "llava" else self.crop_ratio

    def problems_with(self, channels: int) -> Iterator[tuple[str, str]]:
        """Yield (key, message) for each setting that contradicts another one. ``channels``: of the model's images."""
        for key in ("mean", "std"):
            given: Any = getattr(self, key)
            if given is not None and len(given) != channels:
                yield key, f"must have {channels} numbers, one for each channel."
        if self.std is not None and not all(self.std):
            yield "std", "must be above 0."


# Mean and standard deviation of each channel that the weights of a family on the Hub were trained with.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
NORMALIZATION = {"resnet": IMAGENET, "convnext": IMAGENET, "vit": HALF, "clip": CLIP, "llava": CLIP}
