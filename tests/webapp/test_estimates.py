"""What the server says of a run's memory before it is started."""

import json
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.conftest import FIXTURE, Server, fixture_settings
from trainer_core import sources


def estimate(server: Server, **changes: Any) -> Any:
    answer = server.http.post("/api/estimate", json=fixture_settings(**changes))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_demo_is_estimated_from_no_settings_at_all(shared_server: Server) -> None:
    answer = shared_server.http.post("/api/estimate", json={}).json()
    assert list(answer["totals"]) == ["off", "2", "full"]
    assert answer["totals"]["off"] > answer["totals"]["2"] > answer["totals"]["full"] > 0
    assert answer["total"] == answer["totals"]["off"] == sum(answer["parts"].values())
    in_bf16 = (sources.DEMO_MODEL / "model.safetensors").stat().st_size
    assert (answer["precision"], answer["parts"]["weights"]) == ("32-true", pytest.approx(2 * in_bf16, rel=0.05))
    assert 0 < answer["free"] <= psutil.virtual_memory().total


def test_what_is_asked_for_decides(shared_server: Server, tmp_path: Path) -> None:
    plain = estimate(shared_server)
    third = estimate(shared_server, training={"gradient_checkpointing": 3})
    assert list(third["totals"]) == ["off", "2", "3", "full"]
    assert third["total"] == third["totals"]["3"]
    of_four = estimate(shared_server, training={"batch_size": 4})
    assert of_four["parts"]["activations"] == 4 * plain["parts"]["activations"]
    assert estimate(shared_server, adapter={"rank": 64})["parts"]["optimizer"] == 16 * plain["parts"]["optimizer"]
    on_card = estimate(shared_server, hardware={"device": "cuda"}, model={"base_dtype": "bf16"})
    assert (on_card["precision"], on_card["free"]) == ("bf16-mixed", None)
    assert on_card["parts"]["weights"] * 2 == plain["parts"]["weights"]
    folder = shutil.copytree(FIXTURE / "tensors", tmp_path / "tensors")
    sample = torch.load(next(folder.glob("*.pt")))
    for key in ("target_latents", "context_latents"):
        sample[key] = torch.zeros(7500, sample[key].shape[1])
    torch.save(sample, folder / "five minutes.pt")
    (folder / "manifest.json").unlink(missing_ok=True)
    longer = estimate(shared_server, dataset={"source": str(folder)})
    assert longer["parts"]["activations"] > 50 * plain["parts"]["activations"]


def test_settings_that_are_wrong_are_named_and_nothing_is_told(shared_server: Server, tmp_path: Path) -> None:
    answer = shared_server.http.post("/api/estimate", json={"training": {"epochs": "x"}, "adapter": {"rank": 0}})
    assert answer.status_code == 422
    assert set(answer.json()["fields"]) == {"training.epochs", "adapter.rank"}
    assert answer.json()["error"] == "The memory that it takes is told once these are right: Rank, Epochs."
    folder = shutil.copytree(FIXTURE / "checkpoint", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}))
    answer = shared_server.http.post("/api/estimate", json=fixture_settings(model={"source": str(folder)}))
    assert answer.status_code == 422
    assert "has no sound hidden_size" in answer.json()["fields"]["model.source"]


@pytest.mark.parametrize("source", ["a/b--c", "a/b.git", "a/b-", "-a/b", "a/" + "b" * 300])
def test_what_can_be_no_hub_id_is_named(shared_server: Server, source: str) -> None:
    answer = shared_server.http.post("/api/estimate", json={"model": {"source": source}})
    assert answer.status_code == 422
    assert set(answer.json()["fields"]) == {"model.source"}


def test_a_hub_model_that_is_not_here_yet_is_unknown(shared_server: Server) -> None:
    answer = shared_server.http.post("/api/estimate", json={"model": {"source": "nobody/no-such-model"}})
    assert answer.status_code == 422
    assert "not on this machine yet" in answer.json()["error"]
