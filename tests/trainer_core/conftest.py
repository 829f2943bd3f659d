"""A checkpoint of every kind of adapter, and how far another program's reading of it is from what was trained."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.conftest import FIXTURE, make_run
from tests.trainer_core import programs
from tests.trainer_core.programs import Changes
from tests.trainer_core.test_checkpoint import save
from tests.trainer_core.test_model import output
from trainer_core import adapter, model
from trainer_core.config import AdapterConfig
from trainer_core.formats import Precision
from trainer_core.model import LoadedModel

EVERYWHERE = ["self_attention", "cross_attention", "mlp", "condition_embedder", "time_embed.linear_1"]
KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"type": "lora", "rank": 16, "alpha": 32},
    "LoRA of odd strength": {"type": "lora", "rank": 3, "alpha": 7},
    "rank-stabilised LoRA": {"type": "lora", "rank": 8, "alpha": 32, "rank_stabilized": True},
    "DoRA": {"type": "dora", "rank": 16, "alpha": 32},
    "rank-stabilised DoRA": {"type": "dora", "rank": 8, "alpha": 7, "rank_stabilized": True},
    "LoKr": {"type": "lokr", "rank": 4, "alpha": 10, "decompose_factor": 4},
    "LoKr with both decomposed": {
        "type": "lokr", "rank": 1, "alpha": 3, "decompose_factor": 4, "decompose_both": True, "targets": EVERYWHERE[:1]
    },
    "LoKr of whole matrices": {"type": "lokr", "rank": 16, "alpha": 32, "decompose_factor": -1},
}  # fmt: skip


class Exported(NamedTuple):
    """A checkpoint, and what PEFT makes of the adapter in the trained model itself."""

    checkpoint: Path
    changes: Changes
    """Of the base weights, by its own merge."""
    output: Tensor


Checkpoints = dict[str, Exported]
CLOSE: dict[Precision, float] = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}


def trained(kind: str) -> LoadedModel:
    """The fixture model with an adapter that gradients have taken far from its beginning."""
    loaded = model.load(str(FIXTURE / "checkpoint"))
    adapter.inject(loaded.transformer, AdapterConfig.model_validate({"targets": EVERYWHERE} | KINDS[kind]))
    torch.manual_seed(1)
    parameters = [parameter for _, parameter in adapter.trainable(loaded.transformer)]
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    wanted = torch.randn_like(output(loaded))
    for _ in range(5):
        optimizer.zero_grad()
        torch.autograd.backward((output(loaded, gradients=True) - wanted).square().mean())
        optimizer.step()
    return loaded


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A checkpoint of each kind, and what it should do."""
    made = {}
    for kind, settings in KINDS.items():
        run = make_run(tmp_path_factory.mktemp("home"), name=kind, adapter={"targets": EVERYWHERE} | settings)
        loaded = trained(kind)
        save(run, loaded)
        trained_output = output(loaded)
        made[kind] = Exported(run.checkpoints / "step-000006", programs.merged(loaded.transformer), trained_output)
    return made


def difference(found: Changes, expected: Changes) -> float:
    """The largest difference of a weight's change, relative to that change."""
    assert set(found) == set(expected)
    return max(float((found[name] - change).norm() / change.norm()) for name, change in expected.items())
