"""Labeled images: a folder per class, arrays in an `.npz` file, a Hugging Face dataset, scikit-learn's digits.

Pixels have 8 bits. Images are rotated as their EXIF data says, transparency is removed, and of several frames the
first one is used. Pillow decodes files and rejects more than 179 million pixels; arrays are read without pickle.
"""

from __future__ import annotations

import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from scantling.errors import UserError, with_hint
from scantling.trainer.data.files import file_stamp
from scantling.trainer.data.tables import (
    UNLABELED,
    check_columns,
    check_hub,
    class_names,
    describe_type,
    label_text,
    load_hub,
    warn_about_unlabeled,
)
from scantling.trainer.recipe.schema import DIGITS, DataSection, Fields

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
ARRAYS = ("images", "labels")
_WIDE = ("I", "F")
"""Prefixes of the names of Pillow's modes with more than 8 bits."""


class Picture(NamedTuple):
    """One image with its label, and its location for messages."""

    image: Image
    label: str
    where: str


class ImageSource(ABC):
    """Labeled images in a fixed order that can be read repeatedly."""

    name: str
    """Name of the source for messages."""

    @abstractmethod
    def stamp(self) -> Any:
        """Return a JSON value that changes when the images may have changed."""

    @abstractmethod
    def pictures(self) -> Iterator[Picture]:
        """Yield the images. Raises `UserError` with the location of any fault."""


def image_source(section: DataSection, *, validation: bool = False) -> ImageSource:
    """Return the images of a recipe, or those of its `validation`.

    Raises:
        UserError: there are no images, or the path is neither a folder nor an `.npz` file.
    """
    given = section.validation if validation else section.images
    if section.hf is not None:
        split = section.validation if validation else section.hf_split
        if not isinstance(split, str):
            raise UserError(f"data.validation: name one split of {section.hf}")
        return HubImages(section.hf, section.hf_config, split, section.fields)
    if given == DIGITS:
        return Digits()
    key = "data.validation" if validation else "data.images"
    if not isinstance(given, str):
        raise UserError(f"{key}: give a folder of images by class, an .npz file or '{DIGITS}'")
    path = Path(given)
    if path.is_dir():
        return ImageFolder(path)
    if path.is_file() and path.suffix.lower() == ".npz":
        return ImageArrays(path)
    siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    problem = "is neither a folder nor an .npz file" if path.exists() else "is not there"
    text = f"{key}: {given} {problem}; give a folder of images by class, an .npz file or '{DIGITS}'"
    raise UserError(with_hint(text, path.name, [DIGITS, *siblings]))


def check_images(section: DataSection, *, validation: bool = False) -> None:
    """Look for the images of a recipe, without reading their pixels.

    Raises:
        UserError: they cannot be used; the message is the same as in a run.
    """
    split = section.validation if validation else section.hf_split
    if section.hf is not None and isinstance(split, str):
        names = (section.fields.image, section.fields.label)
        check_hub(section.hf, section.hf_config, split, [name for name in names if name is not None])
    else:
        image_source(section, validation=validation)


class Digits(ImageSource):
    """The digits of scikit-learn: 1,797 images of 8 x 8 pixels in 17 shades of gray, written by 43 people.

    Source: Alpaydin and Kaynak, "Optical recognition of handwritten digits", UCI (1998), its test set.
    """

    name = DIGITS

    def stamp(self) -> Any:
        return [DIGITS]

    def pictures(self) -> Iterator[Picture]:
        from PIL import Image

        try:
            from sklearn.datasets import load_digits
        except ImportError:
            raise UserError(
                "data.images: the digits come with scikit-learn, which is not here; pip install 'scantling[vision]'"
            ) from None
        data = load_digits()
        # 17 shades, 0 to 16 -> 0 to 255
        shades = np.rint(data.images * (255 / 16)).astype(np.uint8)
        for number, (pixels, label) in enumerate(zip(shades, data.target, strict=True), 1):
            yield Picture(Image.fromarray(pixels), str(label), f"{DIGITS}, image {number}")


class ImageFolder(ImageSource):
    """Folder with one subfolder per class, which holds images at any depth; other files are ignored."""

    def __init__(self, root: Path) -> None:
        self.name = str(root)
        self.files: list[tuple[Path, str]] = []
        for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
            files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file())
            if not files:
                raise UserError(f"{folder}: no image of this class; read are {', '.join(ENDINGS)}")
            self.files += [(path, folder.name) for path in files]
        if not self.files:
            raise UserError(f"{root}: no folder in it; give a folder that holds a folder of images for each class")

    def stamp(self) -> Any:
        return ["folder", [[label, *file_stamp(path)] for path, label in self.files]]

    def pictures(self) -> Iterator[Picture]:
        from PIL import Image

        for path, label in self.files:
            try:
                with Image.open(path) as image:
                    image.load()
            except Exception as error:  # Pillow does not document which errors it raises
                raise _unreadable(str(path), error) from None
            yield Picture(image, label, str(path))


@dataclass(frozen=True)
class ImageArrays(ImageSource):
    """An `.npz` file with `images`, (n, height, width) or (n, height, width, 3) in uint8, and `labels`, (n,)."""

    path: Path

    @property
    def name(self) -> str:  # type: ignore[override]
        return str(self.path)

    def stamp(self) -> Any:
        return ["npz", file_stamp(self.path)]

    def pictures(self) -> Iterator[Picture]:
        from PIL import Image

        images, labels = self._arrays()
        for number, (pixels, label) in enumerate(zip(images, labels, strict=True), 1):
            where = f"{self.path}, image {number}"
            yield Picture(Image.fromarray(pixels), label_text(label.item(), "labels", where), where)

    def _arrays(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        try:
            with np.load(self.path, allow_pickle=False) as file:
                check_columns(ARRAYS, file.files, str(self.path))
                images, labels = (file[name] for name in ARRAYS)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise UserError(f"{self.path}: not a readable .npz file: {error}") from None
        gray, color = images.ndim == 3, images.ndim == 4 and images.shape[3] == 3
        if images.dtype != np.uint8 or not (gray or color):
            raise UserError(
                f"{self.path}: 'images' must be uint8 of shape (n, height, width) or (n, height, width, 3); given "
                f"{images.dtype} of shape {images.shape}"
            )
        if labels.shape != images.shape[:1]:
            raise UserError(f"{self.path}: 'labels' has shape {labels.shape}, for {len(images)} images")
        return images, labels


class HubImages(ImageSource):
    """A split of a Hugging Face dataset with a column of images, which `datasets` decodes."""

    def __init__(self, path: str, config: str | None, split: str, fields: Fields) -> None:
        self.name, self.fields = f"{path} [{split}]", fields
        self._data = load_hub(path, config, split)
        if fields.label is None:
            raise UserError("data.fields.label: missing; image-classification needs the name of the label column")
        check_columns((fields.image, fields.label), self._data.column_names, self.name)

    def stamp(self) -> Any:
        return ["hf", self._data._fingerprint, self.fields.model_dump()]

    def pictures(self) -> Iterator[Picture]:
        from PIL import Image

        image_name, label_name = self.fields.image, str(self.fields.label)
        classes = class_names(self._data, label_name)
        unlabeled = 0
        rows = self._data.select_columns([image_name, label_name])
        for number in range(len(rows)):
            where = f"{self.name}, row {number + 1}"
            try:
                row = rows[number]
            except Exception as error:
                raise _unreadable(where, error) from None
            image, label = row[image_name], row[label_name]
            if not isinstance(image, Image.Image):
                raise UserError(f"{where}: column '{image_name}' must hold images; given {describe_type(image)}")
            if classes is not None and isinstance(label, int):
                if label == UNLABELED:
                    unlabeled += 1
                    continue
                label = classes[label]
            yield Picture(image, label_text(label, label_name, where), where)
        warn_about_unlabeled(self.name, unlabeled)


def to_pixels(picture: Picture, shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """Return an image as model input, (channels, height, width): converted, and resized with bilinear interpolation.

    Raises:
        UserError: its pixels have more than 8 bits, or cannot be read.
    """
    from PIL import Image, ImageOps

    channels, height, width = shape
    image = picture.image
    if image.mode.startswith(_WIDE):
        raise UserError(f"{picture.where}: pixels of more than 8 bits (mode {image.mode}); convert the image first")
    try:
        image = ImageOps.exif_transpose(image).convert("L" if channels == 1 else "RGB")
    except Exception as error:
        raise _unreadable(picture.where, error) from None
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.uint8)
    # (height, width) -> (1, height, width), or (height, width, 3) -> (3, height, width)
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _unreadable(where: str, error: Exception) -> UserError:
    return UserError(f"{where}: not a readable image: {str(error) or type(error).__name__}")
