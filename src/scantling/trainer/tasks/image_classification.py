"""Image classification: one label per image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from scantling.files import write_json
from scantling.trainer.data.hashing import key64, uniform
from scantling.trainer.data.image_files import check_images
from scantling.trainer.data.images import ImageSet, prepare_images
from scantling.trainer.data.loader import EVALUATION, Batch, Numbered, evenly_spaced
from scantling.trainer.data.progress import Progress
from scantling.trainer.recipe.schema import DIGITS, DataSection
from scantling.trainer.tasks.base import (
    LossSums,
    Task,
    TaskData,
    cross_entropy_sum,
    label_names,
    loss_and_accuracy,
    without_cache,
)

MIDDLE = 127.5
"""Half of the pixel range: pixels from 0 to 255 are scaled to -1 to 1, as for ViT."""


@dataclass(frozen=True)
class PixelBatches:
    """Collate function for images: random shifts and flips in training, pixels scaled to -1 ... 1.

    Args:
        shift: largest shift of a training image in pixels, along each side.
        flip: True to flip half of the training images.
        seed: determines the augmentation, together with the epoch and the image.
    """

    shift: int
    flip: bool
    seed: int

    def __call__(self, examples: list[Numbered]) -> Batch:
        images = [self.changed(epoch, index, item.pixels) for epoch, index, item in examples]
        pixels = torch.from_numpy(np.stack(images)).float().div_(MIDDLE).sub_(1.0)
        labels = torch.tensor([item.label for _, _, item in examples], dtype=torch.long)
        return Batch({"pixel_values": pixels}, labels, num_targets=len(examples), num_tokens=len(examples))

    def changed(self, epoch: int, index: int, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return an image as augmented in this epoch, (channels, height, width); unchanged in evaluation."""
        if epoch == EVALUATION or not (self.shift or self.flip):
            return pixels
        down, right, side = uniform(np.arange(3), key64("image", self.seed, epoch, index))
        if self.flip and side < 0.5:
            pixels = pixels[:, :, ::-1]
        # A draw below 1 gives an integer shift from 0 to 2 * shift; the middle is no shift.
        begins = [int(draw * (2 * self.shift + 1)) for draw in (down, right)]
        around = np.pad(pixels, ((0, 0), (self.shift, self.shift), (self.shift, self.shift)))
        _, height, width = pixels.shape
        return around[:, begins[0] : begins[0] + height, begins[1] : begins[1] + width]


class ImageClassification(Task):
    """Classification of images; an image counts as one token."""

    name: ClassVar[str] = "image-classification"
    auto_class: ClassVar[str] = "AutoModelForImageClassification"

    def prepare(self, data: DataSection, *, seed: int, progress: Progress | None = None) -> TaskData:
        ready = prepare_images(data, seed=seed, progress=progress)
        return TaskData(
            ready.train,
            ready.heldout,
            PixelBatches(data.image_shift, data.image_flip, seed),
            tokenizer=None,
            vocab_size=0,
            labels=ready.labels,
            info=ready.info,
        )

    def _check_source(self, data: DataSection, *, validation: bool) -> None:
        check_images(data, validation=validation)

    def config_overrides(self, data: TaskData) -> dict[str, Any]:
        channels, size, _ = data.info["shape"]
        return {"num_channels": channels, "image_size": size, **label_names(data.labels or [])}

    def planned_overrides(self, data: DataSection, notes: list[str]) -> dict[str, Any]:
        channels, size, _ = data.image_shape
        labels = data.labels or [str(digit) for digit in range(10)] if data.images == DIGITS else data.labels
        if labels is None:
            notes.append("the number of labels is not known before the data is read; 2 are assumed")
        return {"num_channels": channels, "image_size": size, "num_labels": 2 if labels is None else len(labels)}

    def examples_to_tokens(self, data: DataSection) -> int:
        return 1

    def loss(self, model: torch.nn.Module, batch: Batch) -> LossSums:
        logits = model(**batch.inputs, **without_cache(model)).logits
        correct = (logits.detach().argmax(-1) == batch.labels).sum()
        return LossSums(cross_entropy_sum(logits, batch.labels), {"correct": correct})

    def sample_batch(self, batch_size: int, data: DataSection) -> Batch:
        pixels = torch.zeros((batch_size, *data.image_shape))
        labels = torch.zeros(batch_size, dtype=torch.long)
        return Batch({"pixel_values": pixels}, labels, num_targets=batch_size, num_tokens=batch_size)

    def probe(self, config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
        shape = (2, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=generator)}

    def save_inputs(self, folder: Path, data: TaskData, config: Any) -> None:
        """Write the settings of transformers' image processor, which then does the same preprocessing."""
        channels, height, width = data.info["shape"]
        settings = {
            "image_processor_type": "ViTImageProcessor",
            "do_convert_rgb": channels == 3,
            "do_resize": True,
            "size": {"height": height, "width": width},
            "resample": 2,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5] * channels,
            "image_std": [0.5] * channels,
        }
        write_json(folder / "preprocessor_config.json", settings)

    def metrics(self, sums: dict[str, float], data: TaskData) -> dict[str, float]:
        return loss_and_accuracy(sums)

    def baselines(self, data: TaskData, *, max_samples: int | None = None) -> dict[str, float]:
        """Return `majority_accuracy`, and `class_mean_accuracy`: predict the class whose mean image is closest."""
        from scantling.trainer.tasks.baselines import class_mean_accuracy, majority_accuracy

        train, heldout = data.train, data.heldout
        if not isinstance(train, ImageSet) or not isinstance(heldout, ImageSet):
            return {}
        chosen = evenly_spaced(len(heldout), max_samples)
        heldout = replace(heldout, numbers=heldout.numbers[chosen], labels=heldout.labels[chosen])
        return {
            "majority_accuracy": majority_accuracy(train.labels, heldout.labels),
            "class_mean_accuracy": class_mean_accuracy(train, heldout, num_labels=len(data.labels or [])),
        }
