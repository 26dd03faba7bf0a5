"""How many tokens the multimodal encoder is profiled with (section 6.4 of vLLM's memory notes)."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.interval import Interval
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec
from autotune.core.numeric import Number, greatest, least

#: Of processors that are known: pixels along one side of a patch, the most pixels of an image (Qwen2-VL and
#: Qwen2.5-VL: `max_pixels` 12845056; Qwen3-VL: `longest_edge` 16777216), and by how many frame pairs a
#: video may be larger: Qwen2's frames are joined by twos and vLLM profiles at most 14
#: (models/qwen2_vl.py `_MAX_FRAMES_PER_VIDEO`), Qwen3's limit is on all frames together.
KNOWN_PROCESSORS = {
    "qwen2_vl": (14, 12845056, 7), "qwen2_5_vl": (14, 12845056, 7), "qwen2_5_omni": (14, 12845056, 7),
    "qwen3_vl": (16, 16777216, 1), "qwen3_vl_moe": (16, 16777216, 1), "qwen3_5": (16, 16777216, 1),
    "qwen3_5_moe": (16, 16777216, 1),
}  # fmt: skip
#: vLLM's default of `--limit-mm-per-prompt` for each modality.
_UNLIMITED = 999
#: Likely and most tokens of one item where the processor is not known: CLIP and SigLIP give 144 to 729
#: per image, tiled models some thousands.
_OTHER_TOKENS = (1024, 16384)

_ALL = Interval.exact(1.0)


@dataclass(frozen=True)
class EncoderUse:
    """What the options say of encoders.

    Attributes:
        built: share of their parameters that is built: 0 without any modality, 1 with, between unknown.
        skipped: `--skip-mm-profiling`.
        images, videos: most items per prompt; None = not limited by an option.
        max_pixels: of one image or frame, None = the processor's own.
    """

    built: Interval = _ALL
    skipped: bool = False
    images: int | None = None
    videos: int | None = None
    max_pixels: int | None = None


def profiled_tokens(resolved: Resolved, model: ModelSpec, use: EncoderUse) -> Interval:
    """Tokens of all items in the profile batch: items of the modality with most tokens per item, as many
    as fit `max(T, item)` and S prompts.
    """
    if model.family not in KNOWN_PROCESSORS:
        best, high = (_batch(resolved, size, _UNLIMITED) for size in _OTHER_TOKENS)
        return Interval(0.0, best, greatest(best, high))
    side, default_pixels, most_steps = KNOWN_PROCESSORS[model.family]
    pixels = use.max_pixels or model.max_pixels or default_pixels
    image = max(1, pixels // (side * max(1, model.vision_merge)) ** 2)
    sizes: list[Number] = []
    limits: list[int] = []
    if use.images != 0:
        sizes.append(image)
        limits.append(_UNLIMITED if use.images is None else use.images)
    if use.videos != 0:
        # As many frames as the length holds, one pair at least.
        steps = greatest(1, least(most_steps, resolved.max_model_len // image))
        sizes.append(image * steps)
        limits.append(_UNLIMITED if use.videos is None else use.videos)
    if not sizes:
        return Interval.exact(0.0)
    totals = [_batch(resolved, size, limit) for size, limit in zip(sizes, limits, strict=True)]
    # Whichever modality has more tokens per item: the video's when its steps are more than one.
    best = greatest(*totals) if len(totals) > 1 else totals[0]
    known = use.max_pixels is not None
    return Interval(least(*totals) if known else 0.0 * best, best, best * (1.0 if known else 1.5))


def _batch(resolved: Resolved, item: Number, limit: int) -> Number:
    """`items × item`: min(max(T, item) // item, S × max(1, min(limit, L // item)))."""
    budget = greatest(resolved.max_num_batched_tokens, item)
    per_prompt = greatest(1, least(limit, resolved.max_model_len // item))
    items = greatest(1, least(budget // item, resolved.max_num_seqs * per_prompt))
    return items * item
