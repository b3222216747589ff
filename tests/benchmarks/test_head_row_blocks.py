"""Tests of the output layer's benchmark: gradients by row blocks are those of the chunked loss, and all forms step."""

from __future__ import annotations

import pytest
import torch


def test_row_blocks_have_the_gradients_of_the_chunked_loss() -> None:
    import head_row_blocks

    # bf16 has eight bits, and chunks are summed in bf16
    assert head_row_blocks.check_gradients(64) < 2e-2


@pytest.mark.parametrize("form", range(4))
def test_every_form_changes_all_rows(form: int) -> None:
    import head_row_blocks

    head = head_row_blocks.Head(64, head_row_blocks.FORMS[form])
    before = head.weight.detach().clone()
    for group in head.optimizer.param_groups:
        group["lr"] = 1e-2
    head()
    assert bool((head.weight != before).any(1).all())
    assert head.weight.grad is None
    assert head.hidden.grad is not None
    assert bool(torch.isfinite(head.hidden.grad).all())


def test_planned_context_replaces_the_loss_and_takes_it_back() -> None:
    import head_row_blocks

    from scantling.trainer.tasks import chunked_loss

    own = chunked_loss._ChunkedLoss
    head = head_row_blocks.Head(64, "whole")
    with head_row_blocks.row_blocks():
        chunked_loss.chunked_cross_entropy(head.hidden, head.weight, None, head.labels, 8).backward()
    assert chunked_loss._ChunkedLoss is own
    assert head.weight.grad is None  # each block was dropped
    assert head.hidden.grad is not None
