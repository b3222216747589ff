"""Model of a run on the meta device, for everything that needs its shapes alone."""

from __future__ import annotations

from typing import Any

from scantling.trainer.models.build import build_model, convert_model, reads_weights
from scantling.trainer.planning.resolve import ResolvedRun


def planned_model(run: ResolvedRun, notes: list[str], *, buffers: bool = False) -> Any:
    """Return a run's model on the meta device, TT layers at their initial ranks; add assumptions to `notes`.

    Args:
        run: the run.
        notes: list of assumptions.
        buffers: have the values of buffers on the CPU.

    Raises:
        UserError: the model cannot be built.
    """
    recipe = run.recipe
    model = build_model(
        recipe.model,
        run.task,
        vocab_size=run.sizes.vocab_size,
        seq_len=recipe.data.longest,
        config_overrides=run.sizes.config_overrides,
        # any seed: meta weights have no values
        seed=0,
        device="meta",
        buffers=buffers,
    )
    if recipe.tensor is not None and recipe.tensor.init == "random" and reads_weights(recipe.model):
        notes.append(f"tensor.init: random keeps nothing of the weights in {recipe.model.hf} for the TT layers")
    convert_model(model, recipe)
    return model
