"""How the demo's base model was made: pretrained from a seed on sixteen synthetic sounds.

`python -m trainer_core.demo_pretrain` does it again and writes `trainer_core/demo_model` in ACE-Step's original
layout. It takes about four minutes on two cores.
"""

import json
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Generator, Tensor

from trainer_core import objective
from trainer_core.config import TrainingConfig
from trainer_core.demo import BASE_SOUNDS, WIDTH, condition, context, latents
from trainer_core.model import NULL_CONDITION, LoadedModel, build
from trainer_core.naming import DIT_PREFIX, to_original
from trainer_core.sources import DEMO_MODEL

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


def pretrain(steps: int) -> dict[str, Tensor]:
    """Train the base model on the base sounds; its weights under ACE-Step's names, in bf16."""
    torch.manual_seed(0)
    generator = Generator().manual_seed(0)
    transformer = build(CONFIG)
    null_condition = torch.randn(1, 1, WIDTH, generator=generator)
    model = LoadedModel(transformer, "base", CONFIG["timestep_mu"], CONFIG["timestep_sigma"], null_condition, "")
    goal = objective.make_objective(model, TrainingConfig())
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    for step in range(steps):
        count, frames = 8, int(torch.randint(25, 150, (), generator=generator))
        sounds = [BASE_SOUNDS[int(torch.randint(len(BASE_SOUNDS), (), generator=generator))] for _ in range(count)]
        x = torch.stack([latents(sound, frames, generator) for sound in sounds])
        words = torch.stack([condition(sound, 12, generator) for sound in sounds])
        dropped = goal.draw_dropped(count, generator)
        t, noise = (
            goal.draw_timesteps(count, generator),
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
