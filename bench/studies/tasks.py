"""The two tasks of the studies: a language model with AdamW and an image model with SGD momentum.

A task has a model, an optimizer, a learning-rate schedule, the batch of each step and evaluation data.
Batches and evaluation data depend only on a fixed seed and the step, so that training can resume from any
checkpoint. Nothing is downloaded: the text is the source of Python's standard library, and the images are
distorted, noisy characters of matplotlib's fonts.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.core.tiny_gpt import GPTConfig, TinyGPT, batches, read_corpus

SEARCH, HELD_OUT = "search", "held out"  # the two slices of the evaluation data
MODEL_SEED, DATA_SEED = 0, 1
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Result of an evaluation.

    Attributes:
        loss: mean cross entropy in nats.
        accuracy: share of correct answers, 0 to 1.
    """

    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model with its training and evaluation.

    Attributes:
        name: key of the cache and of the tables.
        budgeted: field of `Quality` that the budget of a search limits.
        moments: names of the optimizer's tensors.
        first_step: step of the first checkpoint, after the steep initial fall of the loss.
        interval: number of steps between two checkpoints.
        model: creates the model before step 0.
        optimizer: creates the optimizer of a model.
        rate: returns the learning rate of a step.
        batch: returns (inputs, targets) of a training step.
        slices: returns the evaluation batches of a slice.
    """

    name: str
    budgeted: str
    moments: tuple[str, ...]
    first_step: int
    interval: int
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    rate: Callable[[int], float]
    batch: Callable[[int], Batch]
    slices: Callable[[str], Sequence[Batch]]

    def step_of(self, index: int) -> int:
        """Return the step of a checkpoint; indices count from 0."""
        return self.first_step + index * self.interval

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a batch in nats."""
        inputs, targets = placed(batch, model)
        return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    def evaluate(self, model: nn.Module, part: str, n_batches: int | None = None) -> Quality:
        """Evaluate a model on a slice, or on its first `n_batches` batches."""
        answers = self.answers(model, part, n_batches)
        return Quality(**{name: float(values.double().mean()) for name, values in answers.items()})

    @torch.no_grad()
    def answers(self, model: nn.Module, part: str, n_batches: int | None = None) -> dict[str, Tensor]:
        """Return the loss of each answer [n] and whether it is correct [n], by the fields of `Quality`."""
        model.eval()
        answers: dict[str, list[Tensor]] = {"loss": [], "accuracy": []}
        for batch in self.slices(part)[:n_batches]:
            inputs, targets = placed(batch, model)
            logits, labels = model(inputs).flatten(0, -2), targets.flatten()
            answers["loss"].append(functional.cross_entropy(logits, labels, reduction="none"))
            answers["accuracy"].append(logits.argmax(1) == labels)
        model.train()
        return {name: torch.cat(values) for name, values in answers.items()}


def placed(batch: Batch, model: nn.Module) -> Batch:
    """Move a batch to the device of a model."""
    device = next(model.parameters()).device
    return batch[0].to(device), batch[1].to(device)


def warmup_cosine(peak: float, n_warmup: int, n_steps: int) -> Callable[[int], float]:
    """Return a schedule: linear warm-up, then cosine decay to a tenth of the peak at step `n_steps`."""

    def rate(step: int) -> float:
        if step < n_warmup:
            return peak * (step + 1) / n_warmup
        done = min(1.0, (step - n_warmup) / (n_steps - n_warmup))
        return peak * (0.55 + 0.45 * math.cos(math.pi * done))

    return rate


# --- language -----------------------------------------------------------------------------------

GPT: Final = GPTConfig()
GPT_BATCH, GPT_EVAL_BATCH, GPT_EVAL_BATCHES = 4, 32, 3


@functools.cache
def _texts() -> tuple[Tensor, Tensor]:
    return read_corpus()


def _pair(tokens: Tensor) -> Batch:
    return tokens[:, :-1], tokens[:, 1:]


def text_batch(text: Tensor, step: int) -> Batch:
    """Return the batch of a training step from a text, uint8 [n]."""
    source = batches(text, batch=GPT_BATCH, context=GPT.context, seed=DATA_SEED, start=step)
    return _pair(next(source))


def text_slices(text: Tensor, part: str) -> tuple[Batch, ...]:
    """Return evaluation batches from one half of the validation text; the halves share at most one file."""
    half = len(text) // 2
    source = batches(
        text[:half] if part == SEARCH else text[half:],
        batch=GPT_EVAL_BATCH,
        context=GPT.context,
        seed=7,
    )
    return tuple(_pair(next(source)) for _ in range(GPT_EVAL_BATCHES))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)


def language() -> Task:
    """Create the task of a byte-level GPT of 3.3 M parameters with AdamW."""
    return Task(
        name="language",
        budgeted="loss",
        moments=("exp_avg", "exp_avg_sq"),
        first_step=500,
        interval=260,
        model=TinyGPT,
        optimizer=_adamw,
        rate=warmup_cosine(1e-3, 100, 3880),
        batch=lambda step: text_batch(_texts()[0], step),
        slices=functools.cache(lambda part: text_slices(_texts()[1], part)),
    )


# --- images -------------------------------------------------------------------------------------

Glyphs = Callable[[], tuple[Tensor, Tensor]]  # training and evaluation glyphs, see `distorted`
CHARACTERS: Final = string.digits + string.ascii_letters
FONTS: Final = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmss10", "cmtt10", "cmb10"),
)
GLYPH_SIZE, IMAGE_SIZE = 40, 16  # pixels of a side
IMAGE_BATCH, IMAGE_EVAL_BATCH, IMAGE_EVAL_BATCHES = 64, 512, 4
NOISE: Final = 0.25  # standard deviation; pixels are 0 to 1
WIDTHS: Final = (32, 64, 128, 256)


@functools.cache
def glyphs(characters: str = CHARACTERS, fonts: Sequence[str] = FONTS) -> Tensor:
    """Draw every character in every font: [fonts, characters, GLYPH_SIZE, GLYPH_SIZE], 0 to 1 (ink)."""
    import matplotlib as mpl  # only this task needs fonts
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    drawn = np.zeros((len(fonts), len(characters), GLYPH_SIZE, GLYPH_SIZE), np.float32)
    for i, name in enumerate(fonts):
        font = ImageFont.truetype(str(folder / f"{name}.ttf"), size=26)
        for j, character in enumerate(characters):
            image = Image.new("L", (GLYPH_SIZE, GLYPH_SIZE))
            ImageDraw.Draw(image).text((GLYPH_SIZE // 2,) * 2, character, fill=255, font=font, anchor="mm")
            drawn[i, j] = np.asarray(image, np.float32) / 255
    return torch.from_numpy(drawn)


def distorted(seed: int, n_images: int, drawn: Tensor) -> Batch:
    """Rotate, shear, scale and shift random glyphs, and add noise.

    Args:
        seed: seed of glyphs, distortions and noise.
        n_images: number of images in the batch.
        drawn: glyphs, [variants, classes, GLYPH_SIZE, GLYPH_SIZE].

    Returns:
        Images [n, 1, IMAGE_SIZE, IMAGE_SIZE] and classes [n, 1].
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(n_images, generator=generator)

    variants = torch.randint(drawn.shape[0], (n_images,), generator=generator)
    labels = torch.randint(drawn.shape[1], (n_images,), generator=generator)
    angle, shear = uniform(-0.4, 0.4), uniform(-0.3, 0.3)
    width, height = uniform(0.7, 1.1), uniform(0.7, 1.1)
    cosine, sine = angle.cos(), angle.sin()
    rows = (
        torch.stack([cosine * width, (shear - sine) * height, uniform(-0.2, 0.2)], 1),
        torch.stack([sine * width, cosine * height, uniform(-0.2, 0.2)], 1),
    )
    grid = functional.affine_grid(torch.stack(rows, 1), [n_images, 1, IMAGE_SIZE, IMAGE_SIZE], False)
    images = functional.grid_sample(drawn[variants, labels][:, None], grid, align_corners=False)
    noise = NOISE * torch.randn(images.shape, generator=generator)
    return images + noise, labels[:, None]


class Residual(nn.Module):
    """A residual block of two convolutions with batch norm and a projection shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(outputs)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm_1(self.conv_1(x)))
        return functional.relu(self.norm_2(self.conv_2(y)) + self.downsample(x))


class GlyphNet(nn.Module):
    """A residual network of 1.2 M parameters; `forward` returns logits [n, 1, classes]."""

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, WIDTHS[0], 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTHS[0])
        self.stages = nn.ModuleList(
            Residual(inputs, outputs, 1 if inputs == outputs else 2) for inputs, outputs in _stages()
        )
        self.head = nn.Linear(WIDTHS[-1], n_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm(self.stem(x)))
        for stage in self.stages:
            x = stage(x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits[:, None]


def _stages() -> Iterator[tuple[int, int]]:
    return zip((WIDTHS[0], *WIDTHS), WIDTHS, strict=False)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


def characters() -> tuple[Tensor, Tensor]:
    """Draw digits and letters; training and evaluation differ only in distortions and noise."""
    return glyphs(), glyphs()


def image(drawn: Glyphs = characters) -> Task:
    """Create the task of a small residual network on distorted images, trained by SGD with momentum.

    Args:
        drawn: returns the glyphs for training and for evaluation; see `distorted`.
    """

    def slices(part: str) -> tuple[Batch, ...]:
        seed = 11_000_000 if part == SEARCH else 12_000_000
        evaluated = drawn()[1]
        return tuple(distorted(seed + i, IMAGE_EVAL_BATCH, evaluated) for i in range(IMAGE_EVAL_BATCHES))

    return Task(
        name="image",
        budgeted="accuracy",
        moments=("momentum_buffer",),
        first_step=300,
        interval=100,
        model=lambda: GlyphNet(drawn()[0].shape[1]),
        optimizer=_sgd,
        rate=warmup_cosine(0.05, 60, 1600),
        batch=lambda step: distorted(DATA_SEED * 1_000_003 + step, IMAGE_BATCH, drawn()[0]),
        slices=functools.cache(slices),
    )


TASKS: Final = {"language": language, "image": image}
