"""Batches on their way to a GPU: pinned first, then copied without waiting; elsewhere neither."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from draftsmith.trainers.loop.feed import upload


@pytest.mark.parametrize(("kind", "pins"), [("cuda", True), ("cpu", False)])
def test_pinned_for_a_gpu_alone(kind: str, pins: bool) -> None:
    each = mock.Mock(spec=torch.Tensor)
    pinned = mock.Mock(spec=torch.Tensor)
    each.contiguous.return_value = each  # what numbers share is not pinned as it lies
    each.pin_memory.return_value = pinned
    device = torch.device(kind)
    made = upload({"input_ids": each}, device)["input_ids"]
    if pins:
        pinned.to.assert_called_once_with(device, non_blocking=True)
        assert made is pinned.to.return_value
        assert made.twin_on_host is each
        return
    each.to.assert_called_once_with(device)
    each.pin_memory.assert_not_called()
