"""Every decoder gives an image of the same kind, and a missing library is a clear error."""

import sys
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from scaletrain_cli.data.images.decode import BadImageError, decode
from scaletrain_cli.engine.data.images.reading import decoder_of
from scaletrain_cli.errors import UsageError
from tests.data.images.test_decode import file_of, noise


def test_a_torchvision_that_cannot_be_imported_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    with pytest.raises(UsageError, match=r"data\.images\.decoder"):
        decoder_of("torchvision")
    assert decoder_of("auto") is decoder_of("pillow") is decode


@pytest.mark.parametrize("channels", [1, 3])
def test_tensors_of_torchvision_become_images(monkeypatch: pytest.MonkeyPatch, channels: int) -> None:
    mode = "L" if channels == 1 else "RGB"

    def decode_image(encoded: torch.Tensor, mode: str, apply_exif_orientation: bool) -> torch.Tensor:
        assert apply_exif_orientation
        pixels = np.array(Image.open(BytesIO(encoded.numpy().tobytes())).convert(mode))
        return torch.from_numpy(pixels[None] if mode == "L" else pixels.transpose(2, 0, 1))

    names = SimpleNamespace(GRAY="L", RGB="RGB")
    for name in ("torchvision", "torchvision.io"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(decode_image=decode_image, ImageReadMode=names))
    content = file_of(Image.fromarray(noise(5, 7)))
    found = decoder_of("torchvision")(content, "a.png", channels)
    assert found.mode == mode
    assert np.array_equal(np.asarray(found), np.asarray(decode(content, "a.png", channels)))
    with pytest.raises(BadImageError, match=r"^a\.tar:3\.jpg"):
        decoder_of("torchvision")(b"", "a.tar:3.jpg", channels)


def test_torchvision_decodes_nearly_the_pixels_of_pillow() -> None:
    pytest.importorskip("torchvision.io", exc_type=Exception)
    smooth = Image.fromarray(noise(8, 8)).resize((64, 48), Image.Resampling.BICUBIC)
    content = file_of(smooth, "JPEG", quality=95)
    found, expected = (np.asarray(decoder_of(each)(content, "a", 3), np.int16) for each in ("torchvision", "pillow"))
    assert np.abs(found - expected).max() <= 2
