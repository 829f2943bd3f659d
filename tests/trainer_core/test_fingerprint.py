import pytest
import torch

from trainer_core.fingerprint import fingerprint, spread


def test_any_byte_name_shape_or_order_makes_another_fingerprint() -> None:
    one, two = torch.randn(40, 64), torch.randn(3).bfloat16()
    known = fingerprint([("a", one), ("b", two)])
    assert fingerprint([("a", one.clone()), ("b", two.clone())]) == known
    changed = one.clone()
    changed[17, 3] += 1e-6
    others = [
        [("a", changed), ("b", two)],
        [("a", one.view(64, 40)), ("b", two)],
        [("a", one), ("c", two)],
        [("b", two), ("a", one)],
        [("a", one), ("b", two.float())],
        [("a", one)],
    ]
    found = {fingerprint(other) for other in others}
    assert len(found) == len(others)
    assert known not in found


@pytest.mark.parametrize("shape", [(2048, 2048), (6144, 2048), (2560, 2560), (1024, 64), (9728, 2560), (256,), ()])
def test_values_come_from_every_column_and_all_along_the_rows(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    places = spread(tensor.double(), most=8192).double() if tensor.numel() <= 256 else None
    if places is not None:  # small ones are taken whole
        assert len(places) == tensor.numel()
        return
    columns = torch.arange(shape[-1]).expand(shape).to(torch.float32)
    rows = torch.arange(shape[0])[:, None].expand(shape) / shape[0]
    # bf16 holds whole numbers up to 256: columns are looked at in parts of that size
    seen = {int(value) for value in spread(columns.div(shape[-1] / 64).floor(), most=8192).float()}
    assert seen == set(range(64))
    assert spread(rows.contiguous()).float().quantile(torch.tensor([0.1, 0.5, 0.9])) == pytest.approx(
        torch.tensor([0.1, 0.5, 0.9]), abs=0.02
    )


def test_a_change_of_one_column_in_ten_is_seen() -> None:
    torch.manual_seed(0)
    one = torch.randn(2048, 2048)
    other = one.clone()
    other[:, 1::10] += 1
    assert fingerprint([("w", spread(one))]) != fingerprint([("w", spread(other))])


def test_a_bf16_copy_is_the_same_base_model() -> None:
    weight = torch.randn(300, 200)
    assert fingerprint([("w", spread(weight))]) == fingerprint([("w", spread(weight.bfloat16()))])
