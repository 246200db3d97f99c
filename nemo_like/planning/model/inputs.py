"""Make the input of a training step by a model's config: text, and the pictures or sound that its encoder takes.

The number of places that a picture takes in the text is read from a run of its encoder on fake tensors.
"""

import inspect
import sys
from collections.abc import Mapping
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
    """Return the input of a training step of a transformers `model`: `text`, with pictures or sound as its config has them.

    Args:
        model: on any device; its encoder is run on fake tensors to see its output for one picture.
        text: ``input_ids`` and ``labels``, (batch, tokens). Pictures take their places among these tokens.
        media: the number and size of pictures, and the length of a sound.

    Raises:
        ValueError: the pictures take more places than a sequence has, or more sound is requested than the model has
            positions for.
    """
    batch, tokens = text["input_ids"].shape
    names = inspect.signature(model.forward).parameters
    main, config = getattr(model, "main_input_name", "input_ids"), model.config
    known = main in ("pixel_values", "input_values") or hasattr(config, "max_source_positions")
    if "input_ids" not in names and known:
        shape, words = _alone(main, config, batch, media)
        tensors = {main: torch.empty(shape, device="meta")}
        if "labels" in names and getattr(config, "is_encoder_decoder", False):
            most = getattr(config, "max_target_positions", None) or tokens
            tensors["labels"] = text["labels"][:, :most]
            words += f" and {batch} x {min(tokens, most)} tokens"
        return ModelInput(tensors, words)
    more, words, missing = dict[str, torch.Tensor](), "", ""
    if media.images and "pixel_values" in names and hasattr(config, "vision_config"):
        more, words, missing = _pictures(model, text, media, names)
    if media.audio_seconds != 0.0 and "input_features" in names:
        missing = "sound: its shape is known to the model's processor alone"
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
    taken = {k: v for k, v in (dict(text) | more).items() if k in names or k == "input_ids" or takes_any}
    return ModelInput(taken, f"{batch} x {tokens} tokens{words}", missing)


def _side(vision: Any, media: Media) -> int:
    size = media.image_size or getattr(vision, "image_size", None) or ANY_SIZE
    return max(size) if isinstance(size, tuple | list) else int(size)


def _alone(main: str, config: Any, batch: int, media: Media) -> tuple[tuple[int, ...], str]:
    """Return the shape of pictures, waves or spectrograms for a model that takes no text, or text as labels alone."""
    if main == "pixel_values":
        side = _side(config, media)
        return (batch, getattr(config, "num_channels", 3), side, side), f"{batch} picture(s) of {side} x {side}"
    most = SECONDS if main == "input_values" else 2 * config.max_source_positions / FRAMES
    seconds = most if media.audio_seconds is None else media.audio_seconds
    if seconds > most and main != "input_values":
        raise ValueError(f"--audio-seconds {seconds:g}: the model has positions for {most:g} s.")
    frames, bins = int(FRAMES * seconds), getattr(config, "num_mel_bins", None)
    words = f"{batch} sound(s) of {seconds:g} s"
    if main == "input_values":
        return (batch, int(SAMPLING_RATE * seconds)), words
    return ((batch, frames, config.input_feat_per_channel) if bins is None else (batch, bins, frames)), words


def _pictures(
    model: Any, text: Mapping[str, torch.Tensor], media: Media, names: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], str, str]:
    """Return the tensors that pictures add to `text` or change there, the pictures in words, and the problem."""
    ids, config, count = text["input_ids"], model.config, media.images
    side = _side(config.vision_config, media)
    words = f"{count} picture(s) of {side} x {side} each"
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    try:
        form = _form(model, names, len(ids) * count, side)
        if token is None or not hasattr(model, "get_image_features"):
            return form, f", {words}", ""  # next to the text, without places there: cross-attention, as a rule
        each = _features(model, form) // (len(ids) * count)
    except (ValueError, RuntimeError, TypeError, AttributeError, IndexError, AssertionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return {}, "", f"pictures: get_image_features failed: {reason}"
    # The places of each picture are behind a token of text that tells it apart.
    end, places = count * (each + 1), torch.arange(ids.shape[1])
    if end > len(places):
        raise ValueError(
            f"{words} take {end} tokens of a sequence, which has {len(places)}. Give a longer --seq-len, smaller or fewer "
            "of them (--image-size, --images), or none (0)."
        )
    inside = ((places < end) & (places % (each + 1) != 0)).repeat(len(ids), 1)
    form["input_ids"] = ids.masked_fill(ids == token, 0 if token else 1).masked_fill(inside, token)
    form["labels"] = text["labels"].masked_fill(inside, IGNORED)
    form |= {name: inside.long() for name in ("token_type_ids", "mm_token_type_ids") if name in names}
    return form, f", {words} ({each} of the tokens)", ""


def _form(model: Any, names: Mapping[str, Any], total: int, side: int) -> dict[str, torch.Tensor]:
    """Return `total` pictures in the shape in which a model takes them, by the keywords that it has for them."""
    vision, form = model.config.vision_config, dict[str, torch.Tensor]()
    channels = getattr(vision, "num_channels", 3)
    shape: tuple[int, ...] = (total, channels, side, side)
    if "image_grid_thw" in names:
        merge = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_size", None) or 1
        rows = max(merge, side // vision.patch_size // merge * merge)
        form["image_grid_thw"] = torch.tensor([[1, rows, rows]] * total)
        depth = getattr(vision, "temporal_patch_size", None) or 1
        shape = (total * rows * rows, channels * depth * vision.patch_size**2)
    tiles_of = getattr(sys.modules[type(model).__module__], "image_size_to_num_patches", None)
    if tiles_of is not None:  # pictures cut into tiles, and the whole one as the first
        tiles = tiles_of([side, side], model.config.image_grid_pinpoints, vision.image_size)
        shape = (total, tiles, channels, vision.image_size, vision.image_size)
    if tiles_of is not None or vision.model_type == "pixtral":
        form["image_sizes"] = torch.tensor([[side, side]] * total)
    return form | {"pixel_values": torch.empty(shape, device="meta")}


def _features(model: Any, form: dict[str, torch.Tensor]) -> int:
    """Return the number of tokens that the encoder makes of `form`."""
    with quiet(FAKE_LOGGER), FakeRun(model=model) as run, torch.no_grad():
        copied: Any = model_copy(model)
        with with_state(copied, run.state(copied)):
            features = copied.get_image_features(**run.sample(form))
    features = getattr(features, "pooler_output", features)
    return sum(t.shape[:-1].numel() for t in tensors_in(features))
