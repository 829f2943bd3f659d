"""The transformer's first and last layer as products over whole patches.

ACE-Step computes them as convolutions whose stride is their width, which is the same. A convolution's result lies
channel by channel in memory, and so then does every activation of every block, though their norms and products go token
by token; a product's lies as they want it.
"""

import torch.nn.functional as F
from diffusers import AceStepTransformer1DModel
from torch import Tensor, nn


class PatchesIn(nn.Conv1d):
    """Makes a token of each patch of frames."""

    def forward(self, input: Tensor) -> Tensor:
        """Tokens [B, width, N / patch] of frames [B, channels, N], N a multiple of the patch."""
        patches = input.transpose(1, 2).reshape(len(input), -1, self.kernel_size[0] * input.shape[1])
        return F.linear(patches, self.weight.transpose(1, 2).flatten(1), self.bias).transpose(1, 2)


class PatchesOut(nn.ConvTranspose1d):
    """Makes a patch of frames of each token."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Frames [B, channels, N * patch] of tokens [B, width, N]."""
        assert output_size is None
        assert self.bias is not None
        weight, bias = self.weight.permute(2, 1, 0).flatten(0, 1), self.bias.repeat(self.kernel_size[0])
        patches = F.linear(input.transpose(1, 2), weight, bias)
        return patches.reshape(len(input), -1, self.weight.shape[1]).transpose(1, 2)


def use_patches(transformer: AceStepTransformer1DModel) -> None:
    """Make `transformer` compute so. Weights, and names with them, stay."""
    transformer.proj_in_conv.__class__ = PatchesIn
    transformer.proj_out_conv.__class__ = PatchesOut
