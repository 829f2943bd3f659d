"""torch.compile of the transformer's blocks, or training without it.

One graph for windowed blocks, one for the others, and one for the first, whose input needs no gradient.
"""

from collections.abc import Callable

from diffusers import AceStepTransformer1DModel

from trainer_core.sources import plain


def compile_blocks(transformer: AceStepTransformer1DModel, rehearse: Callable[[], None]) -> str:
    """Compile every block in place, under its own names; what went wrong, or nothing.

    `rehearse` computes a batch forward and backward, by which the graphs are made before training counts on them. If
    it fails, the blocks are as before. A batch of another shape that can't be compiled later is computed without; in
    versions of PyTorch that compile backward only when it is needed, one that can't be compiled backward ends the run.
    """
    import torch._dynamo
    import torch._functorch.config

    # Backward together with forward: for a later shape its failure, too, is then one of compiling, and no run's end.
    if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):  # not in every version
        torch._functorch.config.force_non_lazy_backward_lowering = True
    torch._dynamo.config.suppress_errors = False
    for block in transformer.layers:
        block.compile()
    try:
        rehearse()
    except Exception as error:
        for block in transformer.layers:
            block._compiled_call_impl = None  # what Module.compile sets; PyTorch has no way back from it
        return plain(f"{type(error).__name__}: {' '.join(str(error).split())}", 300)
    torch._dynamo.config.suppress_errors = True
    return ""
