"""Make the input of a training step by a model's config: text, and the pictures or sound that its other encoders take.

The number of places that a picture or a sound takes in the text is read from a run of its encoder on fake tensors.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemo_like._util.log import quiet
from nemo_like._util.tensors import tensors_in
from nemo_like.fake.model_copy import model_copy, with_state
from nemo_like.fake.run import FakeRun
from nemo_like.losses.rows import IGNORED
from nemo_like.torch_compat import FAKE_LOGGER

SAMPLING_RATE = 16_000  # Samples per second of the models that take waves.
FRAMES = 100  # Spectrogram columns per second: a hop of 10 ms, as Whisper and its descendants have it.
# Pixels per side, where the config names none because the encoder takes pictures of any size (Qwen-VL).
ANY_SIZE = 448
SECONDS = 30.0


@dataclass(frozen=True)
class Media:
    """Pictures and sound that go with the text."""

    images: int = 1  # Pictures per sequence, for a model that takes some; 0: none.
    image_size: int | None = None  # Pixels per side; None: the config's, or `ANY_SIZE`.
    # Seconds of the one sound per sequence, for a model that takes some; 0: none; None: as many as the config has
    # positions for, or `SECONDS`.
    audio_seconds: float | None = None


@dataclass(frozen=True)
class ModelInput:
    """Keywords of one call."""

    tensors: Mapping[str, torch.Tensor]  # Integers are real, on the CPU; all else is on the meta device.
    words: str  # Description of the tensors.
    missing: str = ""  # Inputs that could not be made, and why; empty: none.


def model_input(model: nn.Module, text: Mapping[str, torch.Tensor], media: Media = Media()) -> ModelInput:
    """Return the input of a training step of a transformers `model`: `text`, with pictures and sound as its config has them.

    Args:
        model: on any device; its encoders are run on fake tensors to see their output for one picture.
        text: ``input_ids`` and ``labels``, (batch, tokens). Pictures and sounds take their places among these tokens.
        media: the number and size of pictures and sounds.

    Raises:
        ValueError: the pictures and sounds take more places than a sequence has, or more sound is requested than the
            model has positions for.
    """
    batch, tokens = text["input_ids"].shape
    names = inspect.signature(model.forward).parameters
    main, config = getattr(model, "main_input_name", "input_ids"), model.config
    alone = None if "input_ids" in names else _alone(main, config, batch, media)
    if alone is not None:
        tensors, words = alone
        if "labels" in names and getattr(config, "is_encoder_decoder", False):
            most = getattr(config, "max_target_positions", None) or tokens
            tensors["labels"] = text["labels"][:, :most]
            words += f" and {batch} x {min(tokens, most)} tokens"
        return ModelInput(tensors, words)
    builder = _Beside(model, dict(text), media)
    words = f"{batch} x {tokens} tokens"
    missing = []
    takes_pictures = "pixel_values" in names and _vision(config) is not None
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
    for kind, make, wanted in (
        ("pictures", builder.pictures, media.images and takes_pictures),
        ("sound", builder.sound, media.audio_seconds != 0.0 and "input_features" in names),
    ):
        if not wanted:
            continue
        placed, problem = make()
        words += f", {placed}" if placed else ""
        missing += [f"{kind}: {problem}"] if problem else []
    return ModelInput(
        {k: v for k, v in builder.text.items() if k in names or k == "input_ids" or takes_any},
        words,
        "; ".join(missing),
    )


def _vision(config: Any) -> Any:
    return getattr(config, "vision_config", None)


def _side(vision: Any, media: Media) -> int:
    size = media.image_size or getattr(vision, "image_size", None) or ANY_SIZE
    return max(size) if isinstance(size, tuple | list) else int(size)


def _meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def _alone(main: str, config: Any, batch: int, media: Media) -> tuple[dict[str, torch.Tensor], str] | None:
    """Return the input of a model that takes no text, or text as labels alone; None: it takes text."""
    if main == "pixel_values":
        side, channels = _side(config, media), _channels(config)
        return {main: _meta(batch, channels, side, side)}, f"{batch} picture(s) of {side} x {side}"
    if main == "input_values":
        seconds = SECONDS if media.audio_seconds is None else media.audio_seconds
        return {main: _meta(batch, int(SAMPLING_RATE * seconds))}, f"{batch} sound(s) of {seconds:g} s"
    positions = getattr(config, "max_source_positions", None)
    if main == "input_features" and positions is not None:
        seconds = 2 * positions / FRAMES if media.audio_seconds is None else media.audio_seconds
        frames = int(FRAMES * seconds)
        if frames > 2 * positions:
            raise ValueError(f"--audio-seconds {seconds:g}: the model has positions for {2 * positions / FRAMES:g} s.")
        bins = getattr(config, "num_mel_bins", None)
        shape = (batch, frames, config.input_feat_per_channel) if bins is None else (batch, bins, frames)
        return {main: _meta(*shape)}, f"{batch} sound(s) of {seconds:g} s"
    return None


def _channels(vision: Any) -> int:
    return next(
        (getattr(vision, name) for name in ("num_channels", "in_channels", "in_chans") if hasattr(vision, name)), 3
    )


class _Beside:
    """Text with places for the outputs of other encoders."""

    def __init__(self, model: nn.Module, text: dict[str, torch.Tensor], media: Media) -> None:
        self.config: Any = model.config
        self.model, self.text, self.media = model, text, media
        self.batch, self.tokens = text["input_ids"].shape
        self.names = inspect.signature(model.forward).parameters
        # Number of the first token of each sequence that is not a place of a picture or a sound yet.
        self.at = 0

    def pictures(self) -> tuple[str, str]:
        """Put pictures into `text`. Return in words the pictures put there, and the problem."""
        side, count = _side(_vision(self.config), self.media), self.media.images
        words = f"{count} picture(s) of {side} x {side} each"
        return self._put(words, list(_forms(self.model, self.names, self.batch, count, side)), count)

    def sound(self) -> tuple[str, str]:
        """Put one sound for each sequence into `text`; return as `pictures` does."""
        audio = next(
            (getattr(self.config, n) for n in ("audio_config", "encoder_config") if hasattr(self.config, n)), None
        )
        positions = getattr(audio, "max_source_positions", None)
        most = SECONDS if positions is None else 2 * positions / FRAMES
        seconds = most if self.media.audio_seconds is None else self.media.audio_seconds
        frames, bins = int(FRAMES * seconds), getattr(audio, "num_mel_bins", 128)
        form = {"input_features": _meta(self.batch, bins, frames)}
        for name in ("feature_attention_mask", "input_features_mask"):
            if name in self.names:
                form[name] = torch.ones(self.batch, frames, dtype=torch.long)
        return self._put(f"a sound of {seconds:g} s each", [form], 1, frames)

    def _put(self, words: str, forms: list[dict[str, torch.Tensor]], count: int, frames: int = 0) -> tuple[str, str]:
        """Put the first of `forms` that the encoder takes into `text`.

        frames: those of a sound, of which no encoder makes more tokens; 0: these are pictures.
        """
        kind = "audio" if frames else "image"
        method, token = f"get_{kind}_features", _token(self.config, kind)
        if token is None or not hasattr(self.model, method):
            if frames:
                return "", f"the model does not state how many tokens they take ({method}, {kind}_token_id)"
            self.text |= forms[0]  # next to the text, which has no places for them: cross-attention, as a rule
            return words, ""
        problem = ""
        for form in forms:
            try:
                features = self._features(method, form)
            except (ValueError, RuntimeError, TypeError, AttributeError, IndexError, AssertionError) as error:
                problem = (
                    problem or f"{method} failed: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
                )
                continue
            each = features // (self.batch * count)
            if frames and each > frames:
                return "", f"{method} takes them in another shape than {tuple(form['input_features'].shape)}"
            self._mark(token, each, count, 3 if frames else 1, words)
            self.text |= form
            return f"{words} ({each} of the tokens)", ""
        return "", problem

    def _features(self, method: str, form: dict[str, torch.Tensor]) -> int:
        """Return the number of tokens that the encoder makes of `form`."""
        with quiet(FAKE_LOGGER), FakeRun(model=self.model) as run, torch.no_grad():
            model = model_copy(self.model)
            with with_state(model, run.state(model)):
                features = getattr(model, method)(**run.sample(form))
        features = getattr(features, "pooler_output", features)
        return sum(t.shape[:-1].numel() for t in tensors_in(features))

    def _mark(self, token: int, each: int, count: int, modality: int, words: str) -> None:
        """Write `token` into `each` places for each of `count`, each behind a token of text that tells them apart."""
        end = self.at + count * (each + 1)
        if end > self.tokens:
            raise ValueError(
                f"{words} take {count * (each + 1)} tokens of a sequence, which has {self.tokens}. Give a longer --seq-len, "
                "smaller or fewer of them (--image-size, --images, --audio-seconds), or none (0)."
            )
        ids, labels = self.text["input_ids"].clone(), self.text["labels"].clone()
        ids[ids == token] = 0 if token else 1
        kinds = self.text.get("mm_token_type_ids", torch.zeros_like(ids))
        for number in range(count):
            start = self.at + number * (each + 1) + 1
            ids[:, start : start + each], labels[:, start : start + each] = token, IGNORED
            kinds[:, start : start + each] = modality
        self.at = end
        self.text |= {"input_ids": ids, "labels": labels, "mm_token_type_ids": kinds}
        if "token_type_ids" in self.names:
            self.text["token_type_ids"] = (kinds == 1).long()
        if "mm_token_type_ids" not in self.names:
            del self.text["mm_token_type_ids"]


def _token(config: Any, kind: str) -> int | None:
    tokens = (getattr(config, f"{kind}_token_{end}", None) for end in ("id", "index"))
    return next((token for token in tokens if isinstance(token, int)), None)


def _forms(model: nn.Module, names: Any, batch: int, count: int, side: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the shapes in which models take pictures, by the keywords that they have for them; likeliest first."""
    config: Any = model.config
    vision, total = _vision(config), batch * count
    channels = _channels(vision)
    if "image_grid_thw" in names:
        patch = _first(vision.patch_size)
        merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_size", None) or 1
        rows = max(merge, side // patch // merge * merge)
        grid = {"image_grid_thw": torch.tensor([[1, rows, rows]] * total)}
        depth = getattr(vision, "temporal_patch_size", None) or 1
        yield grid | {"pixel_values": _meta(total * rows * rows, channels * depth * patch * patch)}
        yield grid | {"pixel_values": _meta(total * rows * rows, channels, patch, patch)}
        return
    if "aspect_ratio_ids" in names:
        tiles = vision.max_num_tiles
        yield {
            "pixel_values": _meta(batch, count, tiles, channels, side, side),
            "aspect_ratio_ids": torch.ones(batch, count, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(batch, count, tiles, dtype=torch.long),
        }
        return
    sizes = {"image_sizes": torch.tensor([[side, side]] * total)} if "image_sizes" in names else {}
    tiles_of = getattr(sys.modules[type(model).__module__], "image_size_to_num_patches", None)
    if sizes and tiles_of is not None:  # pictures cut into tiles, and the whole one as the first
        tile = _first(vision.image_size)
        tiles = tiles_of([side, side], config.image_grid_pinpoints, tile)
        yield sizes | {"pixel_values": _meta(total, tiles, channels, tile, tile)}
    if "pixel_attention_mask" in names:
        yield {"pixel_values": _meta(batch, count, channels, side, side)}
    yield sizes | {"pixel_values": _meta(total, channels, side, side)}
    if sizes:
        yield {"pixel_values": _meta(total, channels, side, side)}


def _first(value: Any) -> int:
    return int(value[0]) if isinstance(value, tuple | list) else int(value)
