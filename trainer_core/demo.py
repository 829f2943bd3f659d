"""The demo's sounds and its data set: eight samples of a sound that its base model has never heard.

The base model knows other sounds of the same making; `demo_pretrain` made it.
"""

import math
from typing import Any

import torch
from torch import Generator, Tensor

WIDTH = 128
FRAMES_PER_SECOND = 25
VOICES = 6
SECONDS = (8, 9, 11, 12, 14, 15, 18, 20)
BASE_SOUNDS, DEMO_SOUND = range(1, 17), 99
"""Seeds of the timbres: how the voices spread over the 64 latent channels."""


def latents(sound: int, frames: int, generator: Generator) -> Tensor:
    """Made-up audio latents [frames, 64] of about unit variance.

    Voices that swell and turn at their own pace, spread over the channels by a matrix that is the sound's own.
    """
    timbre = torch.randn(VOICES, 64, generator=Generator().manual_seed(sound)) / math.sqrt(VOICES / 2)
    seconds = torch.arange(frames)[:, None] / FRAMES_PER_SECOND
    pace = 0.2 + 1.8 * torch.rand(VOICES, generator=generator)
    start = 2 * math.pi * torch.rand(VOICES, generator=generator)
    return torch.sin(2 * math.pi * pace * seconds + start) @ timbre + 0.1 * torch.randn(frames, 64, generator=generator)


def condition(sound: int, tokens: int, generator: Generator) -> Tensor:
    """A made-up condition [tokens, WIDTH]: a direction that names the sound, and some words."""
    name = torch.randn(1, WIDTH, generator=Generator().manual_seed(1000 + sound))
    return name + 0.5 * torch.randn(tokens, WIDTH, generator=generator)


def context(frames: int) -> Tensor:
    """Context latents [frames, 128] of text to music: silence as the source, ones as the mask."""
    silence = 0.1 * torch.randn(64, generator=Generator().manual_seed(0))
    return torch.cat([silence.expand(frames, 64), torch.ones(frames, 64)], dim=1)


def samples() -> list[tuple[str, dict[str, Any]]]:
    """The demo data set: eight named samples of 8 to 20 seconds, in the format of preprocessed tensors."""
    generator = Generator().manual_seed(7)
    made = []
    for number, seconds in enumerate(SECONDS, start=1):
        frames, tokens = seconds * FRAMES_PER_SECOND, 12 + number
        tensors = {
            "target_latents": latents(DEMO_SOUND, frames, generator),
            "attention_mask": torch.ones(frames),
            "encoder_hidden_states": condition(DEMO_SOUND, tokens, generator),
            "encoder_attention_mask": torch.ones(tokens),
            "context_latents": context(frames),
            "metadata": {
                "filename": f"demo-{number}.wav",
                "caption": "a synthetic sound",
                "duration": seconds,
            },
        }
        made.append((f"demo-{number}.pt", tensors))
    return made
