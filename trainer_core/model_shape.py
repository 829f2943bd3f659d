"""What a model's config.json says of its size, and the linear layers that follow from it. Light: no torch."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer_core.sources import SourceError

TIME_CHANNELS = 256
"""Of a time's sinusoids."""


class Shape(BaseModel):
    """What a model's config.json says of its size. Defaults are those of diffusers' `AceStepTransformer1DModel`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    hidden_size: int = Field(2048, ge=1, le=1 << 20)
    intermediate_size: int = Field(6144, ge=1, le=1 << 20)
    num_hidden_layers: int = Field(24, ge=1, le=512)
    num_attention_heads: int = Field(16, ge=1, le=1 << 16)
    num_key_value_heads: int = Field(8, ge=1, le=1 << 16)
    head_dim: int = Field(128, ge=1, le=1 << 16)
    in_channels: int = Field(192, ge=1, le=1 << 16)
    audio_acoustic_hidden_dim: int = Field(64, ge=1, le=1 << 16)
    patch_size: int = Field(2, ge=1, le=1 << 16)
    encoder_hidden_size: int | None = Field(None, ge=1, le=1 << 20)
    sliding_window: int = Field(128, ge=1, le=1 << 20)
    layer_types: tuple[str, ...] | None = None

    @property
    def queries(self) -> int:
        """How wide the queries of a token are, all heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def keys(self) -> int:
        """How wide its keys are, and its values."""
        return self.num_key_value_heads * self.head_dim

    def has_window(self, number: int) -> bool:
        """Whether block `number` sees no further than a window; where nothing is said, every other does."""
        kinds = self.layer_types or ()
        return kinds[number] == "sliding_attention" if number < len(kinds) else number % 2 == 0

    @property
    def block(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the linear layers of a block, by diffusers' names."""
        h, i, q, k = self.hidden_size, self.intermediate_size, self.queries, self.keys
        attention = {"to_q": (q, h), "to_k": (k, h), "to_v": (k, h), "to_out.0": (h, q)}
        return {
            **{f"{kind}.{name}": sides for kind in ("self_attn", "cross_attn") for name, sides in attention.items()},
            **{"mlp.gate_proj": (i, h), "mlp.up_proj": (i, h), "mlp.down_proj": (h, i)},
        }

    @property
    def outside(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the linear layers outside of the blocks."""
        h = self.hidden_size
        embed = {"linear_1": (h, TIME_CHANNELS), "linear_2": (h, h), "time_proj": (6 * h, h)}
        return {
            **{f"{kind}.{name}": sides for kind in ("time_embed", "time_embed_r") for name, sides in embed.items()},
            "condition_embedder": (h, self.encoder_hidden_size or h),
        }

    @property
    def parameters(self) -> int:
        """Of the whole transformer, but for the few of norms and biases."""
        patches = (self.in_channels + self.audio_acoustic_hidden_dim) * self.hidden_size * self.patch_size
        return products(self.outside) + patches + self.num_hidden_layers * products(self.block)


def read_shape(config: Mapping[str, Any]) -> Shape:
    """The shape that a model's config describes. Raises SourceError for numbers no model has."""
    try:
        return Shape.model_validate(config)
    except ValidationError as error:
        places = ", ".join(str(problem["loc"][0]) for problem in error.errors())
        raise SourceError(f"The model's config.json has no sound {places}. Download the model again.") from error


def products(sides: Mapping[str, tuple[int, int]]) -> int:
    """The numbers of all these weights."""
    return sum(out * inputs for out, inputs in sides.values())
