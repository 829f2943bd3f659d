import contextlib
import pickle
import random
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import FIXTURE
from trainer_core import dataset, demo, free_memory, sample_shapes
from trainer_core.sources import SourceError


def good(frames: int = 20, tokens: int = 5, width: int = 64) -> dict[str, Any]:
    return {
        "target_latents": torch.randn(frames, 64),
        "attention_mask": torch.ones(frames),
        "encoder_hidden_states": torch.randn(tokens, width),
        "encoder_attention_mask": torch.ones(tokens),
        "context_latents": torch.randn(frames, 128),
        "metadata": {"caption": "x"},
    }


def save(folder: Path, name: str, **changes: Any) -> None:
    tensors = {key: value for key, value in (good() | changes).items() if value is not None}
    torch.save(tensors, folder / name)


def test_the_fixture_loads_with_its_shapes() -> None:
    samples = dataset.load(str(FIXTURE / "tensors"))
    assert [sample.name for sample in samples] == [
        f"{name}.pt" for name in ("1a2b3c4d", "2b3c4d5e", "3c4d5e6f", "4d5e6f70", "5e6f7081")
    ]
    assert {sample.target_latents.dtype for sample in samples} == {torch.bfloat16}
    assert all(41 <= sample.shape[0] <= 75 for sample in samples)
    assert all(sample.context_latents.shape == (sample.shape[0], 128) for sample in samples)
    dataset.check_width(samples, 64)


def test_the_demo_is_eight_samples_in_the_file_format(tmp_path: Path) -> None:
    for name, tensors in demo.samples():
        torch.save(tensors, tmp_path / name)
    from_files, built_in = dataset.load(str(tmp_path)), dataset.load("demo")
    assert len(built_in) == 8
    assert all(8 * 25 <= sample.shape[0] <= 20 * 25 for sample in built_in)
    for one, other in zip(from_files, built_in, strict=True):
        assert one.name == other.name
        assert torch.equal(one.target_latents, other.target_latents)
        assert torch.equal(one.encoder_hidden_states, other.encoder_hidden_states)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_latents": None}, 'has no "target_latents"; it has '),
        ({"context_latents": None}, 'has no "context_latents"'),
        ({"encoder_hidden_states": None}, 'has no "encoder_hidden_states"'),
        ({"encoder_attention_mask": None}, 'has no "encoder_attention_mask"'),
        ({"target_latents": torch.randn(20, 8)}, r"target_latents is \[20, 8\], should be \[any, 64\]"),
        ({"target_latents": torch.randn(64)}, r"target_latents is \[64\], should be \[any, 64\]"),
        ({"context_latents": torch.randn(19, 128)}, r"context_latents is \[19, 128\], should be \[20, 128\]"),
        ({"encoder_hidden_states": torch.randn(1, 5, 64)}, r"encoder_hidden_states is \[1, 5, 64\]"),
        ({"target_latents": torch.full((20, 64), torch.nan)}, "target_latents holds NaN or infinite values"),
        ({"context_latents": torch.full((20, 128), torch.inf)}, "context_latents holds NaN or infinite values"),
        ({"encoder_hidden_states": torch.full((5, 64), torch.nan)}, "encoder_hidden_states holds NaN"),
        ({"target_latents": torch.ones(20, 64, dtype=torch.int64)}, "not a tensor of floating-point numbers"),
        ({"target_latents": torch.full((20, 64), 1e300, dtype=torch.float64)}, "target_latents holds NaN or infinite"),
        ({"target_latents": torch.eye(64)[:20].to_sparse()}, "not a tensor of floating-point numbers"),
        ({"target_latents": "words"}, "not a tensor of floating-point numbers"),
        ({"encoder_attention_mask": torch.ones(4)}, r"encoder_attention_mask is \[4\], should be \[5\]"),
        ({"encoder_attention_mask": torch.zeros(5)}, "it is empty"),
        ({"target_latents": torch.randn(0, 64), "context_latents": torch.randn(0, 128)}, "it is empty"),
    ],
)
def test_a_bad_sample_is_refused_by_file_name_and_reason(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path, "good.pt")
    save(tmp_path, "bad.pt", **changes)
    with pytest.raises(SourceError, match=f"1 of 2 samples in .* bad.pt: .*{message}"):
        dataset.load(str(tmp_path))


def test_every_bad_file_is_named_at_once(tmp_path: Path) -> None:
    save(tmp_path, "good.pt")
    save(tmp_path, "nan.pt", target_latents=torch.full((20, 64), torch.nan))
    save(tmp_path, "short.pt")
    (tmp_path / "short.pt").write_bytes((tmp_path / "short.pt").read_bytes()[:500])
    (tmp_path / "text.pt").write_text("not tensors at all")
    (tmp_path / "empty.pt").touch()
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(SourceError) as caught:
        dataset.load(str(tmp_path))
    message = str(caught.value)
    assert "5 of 6 samples" in message
    assert "short.pt: it is cut short or not a tensor file." in message
    assert "empty.pt: it is cut short or not a tensor file." in message
    assert "text.pt: it is not a file of tensors" in message
    assert "list.pt: it holds a list" in message
    assert "nan.pt: target_latents holds NaN" in message
    assert "good.pt" not in message


class Bomb:
    """Unpickled, it writes a file."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.sentinel,)


def pickled(sentinel: Path) -> bytes:
    """What writes `sentinel` when it is unpickled, as PyTorch saves it."""
    saved = BytesIO()
    torch.save({"weights": Bomb(sentinel)}, saved)
    return saved.getvalue()


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_pickle_with_code_is_not_run(writer: str, tmp_path: Path) -> None:
    sentinel = tmp_path / "sentinel"
    content = good() | {"metadata": Bomb(sentinel)}
    with (tmp_path / "bomb.pt").open("wb") as file:
        torch.save(content, file) if writer == "torch" else pickle.dump(content, file, protocol=2)
    with pytest.raises(SourceError, match=r"bomb\.pt: it is not a file of tensors"):
        dataset.load(str(tmp_path))
    assert not sentinel.exists()


def test_a_file_that_would_take_too_much_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H5, for samples."""
    save(tmp_path, "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as stored, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for entry in stored.infolist():
            content = stored.read(entry) + bytes(50 << 20 if entry.filename.endswith("/data/0") else 0)
            bomb.writestr(entry.filename, content, zipfile.ZIP_DEFLATED)
    with (tmp_path / "long.pt").open("wb") as file:
        file.truncate(sample_shapes.MAX_SAMPLE_BYTES + 1)
    monkeypatch.setattr(torch, "load", pytest.fail)
    with pytest.raises(SourceError, match=r"its parts unpack to 52,\d+,\d+ bytes from \d+,\d+;"):
        dataset.read_tensors(tmp_path / "bomb.pt")
    with pytest.raises(SourceError, match="it has 256 MiB; a sample has no more than 256"):
        dataset.read_tensors(tmp_path / "long.pt")


def test_a_tensor_that_repeats_a_few_bytes_without_end_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "a.pt", target_latents=torch.zeros(1).expand(10**12, 64))
    with pytest.raises(SourceError, match=r"target_latents is \[1000000000000, 64\], larger than 256 MiB"):
        dataset.load(str(tmp_path))


def test_padding_of_the_condition_is_removed(tmp_path: Path) -> None:
    condition = torch.randn(5, 64)
    condition[3:] = torch.nan
    save(tmp_path, "a.pt", encoder_hidden_states=condition, encoder_attention_mask=torch.tensor([1, 1, 1, 0, 0]))
    (sample,) = dataset.load(str(tmp_path))
    assert torch.equal(sample.encoder_hidden_states, condition[:3])


def test_a_slice_does_not_keep_its_whole_storage(tmp_path: Path) -> None:
    large = torch.randn(1000, 64)
    save(tmp_path, "a.pt", target_latents=large[:20])
    (sample,) = dataset.load(str(tmp_path))
    assert sample.target_latents.untyped_storage().nbytes() == 20 * 64 * 4


def test_a_data_set_beyond_its_share_of_memory_stays_in_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        save(tmp_path, f"{number}.pt", encoder_attention_mask=torch.tensor([1, 1, 1, 0, 0]))
    torch.save(good(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    held = dataset.load(str(tmp_path))
    monkeypatch.setattr(free_memory, "DATASET_SHARE", 0.0)
    mapped = dataset.load(str(tmp_path))
    assert [sample.is_mapped for sample in held] == [False] * 4
    assert [sample.is_mapped for sample in mapped] == [True] * 3 + [False]
    assert dataset.sizes(mapped[:3]).bytes == sample_shapes.measure(str(tmp_path)).bytes == 0
    for one, other in zip(mapped, held, strict=True):
        assert all(torch.equal(one.tensors[key], other.tensors[key]) for key in one.tensors)
    value = mapped[0].target_latents[0, 0].clone()
    content = (tmp_path / "0.pt").read_bytes()
    written = content.replace(value.numpy().tobytes(), torch.tensor(7.0).numpy().tobytes(), 1)
    with (tmp_path / "0.pt").open("r+b") as file:  # what no one should do shows that nothing was copied
        file.write(written)
    assert mapped[0].target_latents[0, 0] == 7


def test_a_condition_of_another_width_names_file_and_widths(tmp_path: Path) -> None:
    save(tmp_path, "a.pt", encoder_hidden_states=torch.randn(5, 32))
    with pytest.raises(
        SourceError, match=r"1 of 1 samples do not fit this model: the condition in a.pt is 32 wide.*takes 64"
    ):
        dataset.check_width(dataset.load(str(tmp_path)), 64)


def test_whatever_is_wrong_with_a_files_bytes_is_a_refusal(tmp_path: Path) -> None:
    """F6: bytes changed at random anywhere in the file load or are refused; nothing else is raised."""
    save(tmp_path, "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    generator = random.Random(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(generator.choice((1, 20, 200))):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        (tmp_path / "a.pt").write_bytes(damaged)
        with contextlib.suppress(SourceError):
            dataset.load(str(tmp_path))
            continue
        refused += 1
    assert refused > 100
