"""A length that differs by row, in a model that believes it is one number."""

from __future__ import annotations

import pytest
import torch

from optkit.export.row_lengths import PerRow

LENGTHS = torch.tensor([5, 0, 9])


def test_positions_are_by_row_once_the_model_adds_its_batch_axis() -> None:
    want = LENGTHS[:, None] + torch.arange(4)[None]
    for positions in (torch.arange(4) + PerRow(LENGTHS), PerRow(LENGTHS) + torch.arange(4)):
        assert tuple(positions.shape) == (4,)
        torch.testing.assert_close(positions.unsqueeze(0), want)
        torch.testing.assert_close(positions[None], want)
        torch.testing.assert_close(positions.view(1, 4, 1), want[..., None])


def test_a_temperature_by_position_is_by_row() -> None:
    positions = torch.arange(4) + PerRow(LENGTHS)
    scales = torch.log1p(torch.floor((positions.float() + 1.0) / 8)) * 0.1 + 1.0
    got = scales.view((1, 4, 1, 1)).expand((3, 4, 1, 1))
    by_row = [torch.log1p(torch.floor((torch.arange(4) + n + 1.0) / 8)) * 0.1 + 1.0 for n in LENGTHS]
    torch.testing.assert_close(got[..., 0, 0], torch.stack(by_row))


@pytest.mark.parametrize(
    "use",
    [lambda n: range(n), lambda n: max(0, n), lambda n: torch.zeros(n), lambda n: n.view(3), lambda n: torch.cumsum(n, 0)],
)
def test_what_needs_one_number_is_not_given_a_wrong_one(use: object) -> None:
    with pytest.raises(TypeError):
        use(PerRow(LENGTHS))  # type: ignore[operator]
