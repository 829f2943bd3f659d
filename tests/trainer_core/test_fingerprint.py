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


@pytest.mark.parametrize("shape", [(256,), (3, 5), (1,), ()])
def test_a_small_tensor_is_taken_whole(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    assert torch.equal(spread(tensor), tensor.flatten().bfloat16())


@pytest.mark.parametrize("shape", [(2048, 2048), (6144, 2048), (2560, 2560), (1024, 64), (9728, 2560)])
def test_values_come_from_all_columns_and_all_along_the_rows(shape: tuple[int, int]) -> None:
    rows, columns = shape
    # In 64 parts each, since bf16 holds whole numbers only up to 256.
    part_of_column = (torch.arange(columns) * 64 // columns).expand(shape).float()
    part_of_row = (torch.arange(rows) * 64 // rows)[:, None].expand(shape).float()
    assert set(spread(part_of_column).tolist()) == set(range(64))
    assert set(spread(part_of_row).tolist()) == set(range(64))


def test_a_change_of_one_column_in_ten_is_seen() -> None:
    torch.manual_seed(0)
    one = torch.randn(2048, 2048)
    other = one.clone()
    other[:, 1::10] += 1
    assert fingerprint([("w", spread(one))]) != fingerprint([("w", spread(other))])


def test_a_bf16_copy_is_the_same_base_model() -> None:
    weight = torch.randn(300, 200)
    assert fingerprint([("w", spread(weight))]) == fingerprint([("w", spread(weight.bfloat16()))])
