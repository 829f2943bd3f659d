"""The demo: a tiny base model that knows some synthetic sounds, and a data set of one it has never heard.

`python -m trainer_core.demo` pretrains the model again from its seed and writes it to `trainer_core/demo_model`,
in ACE-Step's original layout. It takes about four minutes on two cores.
"""

import json
import math
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Generator, Tensor

from trainer_core import objective
from trainer_core.model import DIT_PREFIX, NULL_CONDITION, LoadedModel, build, to_original
from trainer_core.sources import DEMO_MODEL

WIDTH = 128
CONFIG: dict[str, Any] = {
    "model_type": "acestep",
    "model_version": "base",
    "is_turbo": False,
    "timestep_mu": -0.4,
    "timestep_sigma": 1.0,
    "hidden_size": WIDTH,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "in_channels": 192,
    "audio_acoustic_hidden_dim": 64,
    "patch_size": 2,
    "sliding_window": 32,
    "rope_theta": 1_000_000,
}
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


def pretrain(steps: int) -> dict[str, Tensor]:
    """Train the base model on the base sounds; its weights under ACE-Step's names, in bf16."""
    torch.manual_seed(0)
    generator = Generator().manual_seed(0)
    transformer = build(CONFIG)
    null_condition = torch.randn(1, 1, WIDTH, generator=generator)
    model = LoadedModel(transformer, "base", CONFIG["timestep_mu"], CONFIG["timestep_sigma"], null_condition)
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    for step in range(steps):
        count, frames = 8, int(torch.randint(25, 150, (), generator=generator))
        sounds = [BASE_SOUNDS[int(torch.randint(len(BASE_SOUNDS), (), generator=generator))] for _ in range(count)]
        x = torch.stack([latents(sound, frames, generator) for sound in sounds])
        words = torch.stack([condition(sound, 12, generator) for sound in sounds])
        dropped = objective.draw_dropped(model, count, generator)
        t, noise = (
            objective.draw_timesteps(model, count, generator),
            torch.randn(x.shape, generator=generator),
        )
        prediction = transformer(
            hidden_states=objective.noisy(x, noise, t),
            timestep=t,
            timestep_r=t,
            encoder_hidden_states=torch.where(dropped.view(-1, 1, 1), null_condition, words),
            context_latents=context(frames).expand(count, -1, -1),
            return_dict=False,
        )[0]
        loss = objective.sample_losses(prediction, x, noise).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)
    weights = {DIT_PREFIX + to_original(name): tensor for name, tensor in transformer.state_dict().items()}
    return {
        name: tensor.bfloat16().contiguous() for name, tensor in (weights | {NULL_CONDITION: null_condition}).items()
    }


def main() -> None:
    """Write the demo model."""
    weights = pretrain(2000)
    DEMO_MODEL.mkdir(exist_ok=True)
    save_file(weights, DEMO_MODEL / "model.safetensors")
    (DEMO_MODEL / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    print(f"wrote {sum(tensor.numel() for tensor in weights.values()):,} parameters to {DEMO_MODEL}")


if __name__ == "__main__":
    main()
